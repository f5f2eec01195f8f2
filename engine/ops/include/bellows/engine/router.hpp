// SPDX-License-Identifier: MIT
#pragma once

// The router of experts: scores, top-k choice, balance. The contract that all ops share stands in
// ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

struct RouterOptions {
    enum class Score : std::uint8_t { Sigmoid, Softmax };
    Score score = Score::Sigmoid;
    /// Experts form `groups` equal groups in order; only the `group_top_k` best take part. A group
    /// counts by the sum of its `group_score_top` (1 or 2) best scores. groups <= 32; 1: no groups.
    std::uint32_t groups = 1;
    std::uint32_t group_top_k = 1;
    std::uint32_t group_score_top = 2;
    bool normalise = true; ///< weights of a token add up to route_scale
    float route_scale = 1;
};

/// Most experts and choices of a token of which a workgroup makes a choice; with more an invocation
/// does.
inline constexpr std::uint64_t kMostSharedExperts = 1024, kMostSharedTopK = 64;

/// Whether every subgroup can make such a choice by itself, in registers.
bool router_by_subgroup(const Device& device, std::uint64_t experts, std::uint64_t top_k);

/// Throws Error{InvalidArgument}, in the name of `op`, where top_k of so many experts cannot be
/// chosen in this way.
void check_router_options(const char* op, const RouterOptions& options, std::uint64_t experts,
                          std::uint64_t top_k);

/// Chooses the top_k experts of each token by score + bias, ties to the lower expert, in
/// descending order; weights come from the scores without the bias.
/// logits: [tokens, experts] f32, bias: [experts] f32 (optional), scores (out, for the gradient):
/// [tokens, experts] f32, topk_ids: [tokens, top_k] i32, topk_weights: [tokens, top_k] f32.
void router_forward(Recording& recording, const TensorView& logits, const TensorView& bias,
                    const TensorView& scores, const TensorView& topk_ids,
                    const TensorView& topk_weights, const RouterOptions& options);

/// DeepSeek-V3's sequence-wise balance loss (its paper, section 2.1.2), as far as the gradient
/// goes: weight * sum over tokens and experts of counts[sequence of the token, e] * s_e / sum_j
/// s_j, the counts being constants. With weight = alpha * experts / (top_k * seq) / tokens of the
/// batch it is alpha * sum_e f_e P_e, averaged over the batch's sequences.
struct RouterBalance {
    TensorView counts; ///< [sequences, experts] u32 (expert_counts); sequences divides tokens
    float weight = 0;  ///< 0: no balance loss, counts are not read
};

/// d_topk_weights: [tokens, top_k] f32; d_logits (out): [tokens, experts] f32.
void router_dgrad(Recording& recording, const TensorView& d_topk_weights,
                  const TensorView& topk_ids, const TensorView& scores, const TensorView& d_logits,
                  const RouterOptions& options, const RouterBalance& balance = {});

/// counts: [experts] u32, the number of slots that chose each expert; or [sequences, experts], of
/// each of so many equal runs of tokens. topk_ids: [tokens, top_k] i32; other values than
/// 0..experts-1 are not counted. topk_ids.row_count is honoured.
void expert_counts(Recording& recording, const TensorView& topk_ids, const TensorView& counts,
                   bool accumulate);

/// bias[e] += rate * sign(mean(counts) - counts[e]). counts: [experts] u32, bias: [experts] f32.
void router_bias_update(Recording& recording, const TensorView& counts, const TensorView& bias,
                        float rate);

} // namespace bellows::ops
