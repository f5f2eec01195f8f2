// SPDX-License-Identifier: MIT
#pragma once

// The router of a mixture-of-experts layer in f64: scores, choice, weights and their gradient; what
// keeps experts evenly loaded; and the permutation that groups rows by expert.

#include "verify/reference/gemm.hpp"

#include <bellows/shape/config.hpp>

#include <cstdint>

namespace bellows::reference {

struct RouterShape {
    std::size_t experts = 0;
    std::size_t top_k = 0;
    std::size_t n_group = 1;    ///< divides experts
    std::size_t topk_group = 1; ///< groups that a token may use
    ScoreFunction score = ScoreFunction::Sigmoid;
    bool normalize = true; ///< weights: chosen scores over their sum (+ 1e-20) ...
    double scale = 1;      ///< ... times this
    GroupScore group_score = GroupScore::Auto;
};

RouterShape router_shape(const ModelConfig& config);

/// logits [tokens, experts] -> scores of the same shape.
Vector router_scores(View logits, const RouterShape& shape);

/// The chosen experts [tokens, top_k], in descending order of score + bias, the lowest index first
/// among equals. With groups only the best topk_group groups take part: a group counts as the sum
/// of its two highest score + bias or as its highest, as group_score says; the lowest group first
/// among equals. bias: [experts] or empty; it takes part in the choice and in nothing else.
std::vector<std::int32_t> router_select(View scores, View bias, const RouterShape& shape);

/// The choices with -1 in place of those beyond the capacity of their group: experts form `groups`
/// equal groups, each of which keeps the `capacity` choices of the highest scores, the first among
/// equals, NaN last. Values outside 0..experts-1 choose nobody. spared: empty, or of equal runs of
/// tokens whether their choices come first and are kept even beyond the capacity.
std::vector<std::int32_t> kept_choices(View scores, std::span<const std::int32_t> experts,
                                       const RouterShape& shape, std::size_t groups,
                                       std::size_t capacity,
                                       std::span<const std::uint32_t> spared = {});

/// For each token the smallest change of one score (or group score) that could change the choice:
/// tests leave tokens whose margin is below their arithmetic's error out of exact comparisons.
Vector router_margins(View scores, View bias, const RouterShape& shape);

/// The weights [tokens, top_k] of the chosen experts.
Vector router_weights(View scores, std::span<const std::int32_t> experts, const RouterShape& shape);

/// dweights [tokens, top_k] -> dlogits [tokens, experts], the choice being constant.
/// dscores: [tokens, experts] or empty, a gradient that reaches the scores from elsewhere.
Vector router_input_grad(View dweights, View dscores, View scores,
                         std::span<const std::int32_t> experts, const RouterShape& shape);

/// How many slots chose each expert: [experts].
std::vector<std::uint64_t> count_experts(std::span<const std::int32_t> experts,
                                         std::size_t num_experts);

/// The aux-loss-free rule: bias + rate · sign(mean(counts) - counts), sign(0) = 0.
Vector updated_bias(View bias, std::span<const std::uint64_t> counts, double rate);

// --- permutation ---------------------------------------------------------------------------------

/// Rows grouped by expert, in each group in ascending order of token; groups start at multiples of
/// the alignment and rows in between are zero.
struct Permutation {
    std::size_t tokens = 0, top_k = 0;
    std::vector<std::uint64_t> counts;     ///< [experts]
    std::vector<std::uint64_t> starts;     ///< [experts + 1], the last: rows in total
    std::vector<std::int64_t> row_of_slot; ///< [tokens, top_k], -1 for absent slots
    std::size_t rows() const { return static_cast<std::size_t>(starts.back()); }
};

/// experts: [tokens, top_k]; negative ones are absent.
Permutation make_permutation(std::span<const std::int32_t> experts, std::size_t top_k,
                             std::size_t num_experts, std::size_t alignment = 1);
/// x [tokens, hidden] -> [rows, hidden].
Vector permute(View x, const Permutation& permutation, std::size_t hidden);
/// [rows, hidden] -> [tokens, hidden]: each token's rows times weights [tokens, top_k] (or 1 if
/// empty), summed. With empty weights it is permute's input-gradient.
Vector unpermute(View rows, View weights, const Permutation& permutation, std::size_t hidden);

struct UnpermuteGrads {
    Vector drows;    ///< [rows, hidden]
    Vector dweights; ///< [tokens, top_k]
};
UnpermuteGrads unpermute_input_grad(View dy, View rows, View weights,
                                    const Permutation& permutation, std::size_t hidden);

} // namespace bellows::reference
