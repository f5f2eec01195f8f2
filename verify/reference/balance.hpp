// SPDX-License-Identifier: MIT
#pragma once

// The losses of a mixture-of-experts router in f64: those that balance the load of experts and of
// devices, and the one that keeps logits small. docs/balance.md has their formulas.

#include "verify/reference/router.hpp"

namespace bellows::reference {

struct BalanceShape {
    BalanceLossKind kind = BalanceLossKind::Sequence;
    double alpha = 0, device_alpha = 0, communication_alpha = 0;
    std::size_t devices = 1;           ///< equal runs of experts
    std::size_t devices_per_token = 1; ///< to so many a token may go
};

BalanceShape balance_shape(const ModelConfig& config);

/// What a run of tokens chose; constants to the gradient.
struct BalanceCounts {
    std::size_t tokens = 0;
    /// By expert, what the experts' loss counts: of the choices (kind Expert), or of the top_k of
    /// the scores without bias and groups.
    std::vector<std::uint64_t> experts;
    std::vector<std::uint64_t> choices;       ///< by expert, of the choices whatever the kind
    std::vector<std::uint64_t> device_tokens; ///< by device: tokens that chose some expert of it
};

/// Of `runs` equal runs of these tokens: sequences, or 1 for the kinds MicroBatch and Global.
/// experts: [tokens, top_k], the choices.
std::vector<BalanceCounts> balance_counts(View scores, std::span<const std::int32_t> experts,
                                          const RouterShape& shape, const BalanceShape& balance,
                                          std::size_t runs);

/// For the kind Global: those of several micro-batches.
BalanceCounts sum(const BalanceCounts& one, const BalanceCounts& other);

struct BalanceLoss {
    double experts = 0;       ///< alpha · Σ_i f_i P_i
    double devices = 0;       ///< device_alpha · Σ_g f'_g P'_g
    double communication = 0; ///< communication_alpha · Σ_g f''_g P'_g
    Vector dscores;           ///< [tokens, experts], of their sum
    double loss() const { return experts + devices + communication; }
};
/// Averaged over the runs of total_tokens tokens, of which these are some. Of each run:
///   f_i = E / (K T) · experts_i      P_i = mean over its tokens of score_i / Σ_j score_j
///   f'_g = mean over g's experts of E / (K T) · choices_i       P'_g = sum over them of P_i
///   f''_g = D / (M T) · device_tokens_g
/// counts: one for each equal run of the tokens given here.
BalanceLoss balance_loss(View scores, std::span<const BalanceCounts> counts,
                         const RouterShape& shape, const BalanceShape& balance,
                         std::size_t total_tokens);

struct ZLoss {
    double loss = 0;
    Vector dlogits; ///< [tokens, experts]
};
/// weight · Σ over tokens of (log Σ_i exp l_i)^2 / total_tokens.
ZLoss router_z_loss(View logits, std::size_t experts, std::size_t total_tokens, double weight);

} // namespace bellows::reference
