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

/// What balance losses count, beside the choices of experts.
struct BalanceCounts {
    bool of_scores = false;    ///< the top_k experts by the scores alone, in place of the choices
    std::uint32_t devices = 0; ///< equal runs of experts; 0: not counted
    bool tokens = false;       ///< counted, too, in one run
    /// Columns of the counts: experts, then each device's slots, each device's tokens, then tokens.
    std::uint64_t columns(std::uint64_t experts) const noexcept {
        return experts + 2 * devices + (tokens ? 1 : 0);
    }
};

/// counts: [runs, what.columns(experts)] u32, added to, of as many equal runs of tokens.
/// scores: [tokens, experts] f32, of router_forward; topk_ids: [tokens, top_k] i32, other values
/// than 0..experts-1 are not counted. Ties between scores go to the lower expert.
void balance_counts(Recording& recording, const TensorView& scores, const TensorView& topk_ids,
                    const TensorView& counts, const BalanceCounts& what);

/// The losses that balance the load, as far as the gradient goes. DeepSeek-V3's sequence-wise one
/// (its paper, section 2.1.2): weight * sum over tokens and experts of counts[run of the token, e]
/// * s_e / sum_j s_j, the counts being constants. With weight = alpha * experts / (top_k * seq) /
/// tokens of the batch and sequences as runs it is alpha * sum_e f_e P_e, averaged over the batch's
/// sequences. Those of DeepSeek-V2 for devices (its paper, section 2.2.3) put device_weight *
/// slots + communication_weight * tokens of the expert's device in place of weight * counts.
struct RouterBalance {
    TensorView counts; ///< [runs, counted.columns(experts)] u32; runs divides tokens
    float weight = 0;
    float device_weight = 0, communication_weight = 0; ///< need counted.devices
    /// What the counts are (of_scores makes no difference here). With tokens they may be of more
    /// than these tokens: all is divided by counted tokens / tokens.
    BalanceCounts counted{};
    /// All 0: no loss, counts are not read.
    bool any() const noexcept {
        return weight != 0 || device_weight != 0 || communication_weight != 0;
    }
};

/// weight * sum over tokens of (log sum_e exp l_e)^2, which keeps logits small (ST-MoE).
struct RouterZLoss {
    TensorView logits; ///< [tokens, experts] f32
    float weight = 0;  ///< 0: no such loss, logits are not read
};

/// d_topk_weights: [tokens, top_k] f32; d_logits (out): [tokens, experts] f32.
void router_dgrad(Recording& recording, const TensorView& d_topk_weights,
                  const TensorView& topk_ids, const TensorView& scores, const TensorView& d_logits,
                  const RouterOptions& options, const RouterBalance& balance = {},
                  const RouterZLoss& z_loss = {});

/// Experts form `groups` equal groups in order, each with room for `capacity` slots: kept_ids (out)
/// are the topk_ids of the slots with the highest scores, the lower slot first among equals, and -1
/// in place of the others. scores: [tokens, experts] f32, NaN is less than any; topk_ids, kept_ids:
/// [tokens, top_k] i32. spared: nothing, or [runs] u32, runs dividing tokens: slots of tokens whose
/// run's value is not 0 take their room first and are kept even where it does not suffice.
/// A workgroup for each group reads all ids four times, more often among equals.
void router_capacity(Recording& recording, const TensorView& scores, const TensorView& topk_ids,
                     const TensorView& kept_ids, std::uint32_t groups, std::uint64_t capacity,
                     const TensorView& spared = {});

/// counts: [experts] u32, the number of slots that chose each expert; or [sequences, experts], of
/// each of so many equal runs of tokens. topk_ids: [tokens, top_k] i32; other values than
/// 0..experts-1 are not counted. topk_ids.row_count is honoured.
void expert_counts(Recording& recording, const TensorView& topk_ids, const TensorView& counts,
                   bool accumulate);

/// bias[e] += rate * sign(mean(counts) - counts[e]). counts: [experts] u32, bias: [experts] f32.
void router_bias_update(Recording& recording, const TensorView& counts, const TensorView& bias,
                        float rate);

} // namespace bellows::ops
