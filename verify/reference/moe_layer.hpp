// SPDX-License-Identifier: MIT
#pragma once

// One MoE layer in f64, with its experts spread over ranks that live in this one process: what each
// rank routes, receives, computes and gets back, so that a distributed layer can be checked stage
// by stage. With one rank it is the layer of the reference model.

#include "verify/reference/gemm.hpp"
#include "verify/reference/router.hpp"

#include <cstdint>

namespace bellows::reference {

/// Experts in contiguous blocks; the first (experts mod ranks) ranks hold one more.
struct ExpertPartition {
    std::size_t experts = 0;
    std::size_t ranks = 1;
    std::size_t first(std::size_t rank) const;
    std::size_t count(std::size_t rank) const;
    std::size_t owner(std::size_t expert) const;
};

struct MoeShape {
    RouterShape router;
    std::size_t hidden = 0;
    std::size_t ffn = 0;
    std::size_t shared_ffn = 0; ///< 0: no shared experts
    /// Equal groups of experts, each of which takes capacity_factor times the mean of the choices
    /// of a rank's tokens; 0: all choices are taken.
    std::size_t capacity_groups = 0;
    double capacity_factor = 0;
    /// Of each rank's equal runs of tokens whether none of their choices is dropped; empty: any
    /// may.
    std::vector<std::uint32_t> spared{};
};

MoeShape moe_shape(const ModelConfig& config);

struct MoeWeights {
    Vector router;               ///< [experts, hidden]
    Vector bias;                 ///< [experts] or empty
    std::vector<Vector> gate_up; ///< per expert [2·ffn, hidden]
    std::vector<Vector> down;    ///< per expert [hidden, ffn]
    Vector shared_gate_up;       ///< [2·shared_ffn, hidden] or empty
    Vector shared_down;          ///< [hidden, shared_ffn] or empty
};

/// What a rank does for its own tokens.
struct RankTokens {
    std::size_t tokens = 0;
    Vector logits;                     ///< [tokens, experts]
    Vector scores;                     ///< [tokens, experts]
    std::vector<std::int32_t> experts; ///< [tokens, top_k], global indices
    std::vector<std::int32_t> sent;    ///< the same, with -1 for choices that are dropped
    Vector weights;                    ///< [tokens, top_k]
    Vector shared_gate_up;             ///< [tokens, 2·shared_ffn]
    Vector y; ///< [tokens, hidden]: routed plus shared, without the residual
};

struct RowOrigin {
    std::size_t rank = 0, token = 0, slot = 0;
    bool operator==(const RowOrigin&) const = default;
};

/// What a rank does for the tokens that its experts receive: rows in the order local expert, source
/// rank, token.
struct RankRows {
    std::vector<RowOrigin> origins;
    std::vector<std::uint64_t> counts; ///< per local expert
    Vector x;                          ///< [rows, hidden]
    Vector weight;                     ///< [rows]
    Vector gate_up;                    ///< [rows, 2·ffn]
    Vector activation;                 ///< [rows, ffn]: swiglu times weight
    Vector y;                          ///< [rows, hidden]: summed over a token's rows by combine
};

struct MoeForward {
    std::vector<RankTokens> tokens; ///< per rank
    std::vector<RankRows> rows;     ///< per rank
};

/// x: per rank [tokens, hidden]; tokens may differ and be 0.
/// routing: per rank the experts to take instead of the router's choice (finite differences).
MoeForward moe_forward(const std::vector<Vector>& x, const MoeWeights& weights,
                       const MoeShape& shape, const ExpertPartition& partition,
                       const std::vector<std::vector<std::int32_t>>* routing = nullptr);

struct MoeGrads {
    std::vector<Vector> dx;       ///< per rank [tokens, hidden]
    std::vector<Vector> dweights; ///< per rank [tokens, top_k]: of the routing weights
    std::vector<Vector> dlogits;  ///< per rank [tokens, experts]
    std::vector<Vector> drows;    ///< per rank [rows, hidden]: of RankRows::x
    MoeWeights weights;           ///< summed over all ranks' tokens; bias stays empty
};

/// dy: per rank [tokens, hidden]. dscores and dlogits: per rank [tokens, experts], from balance
/// losses and from the z loss, or empty.
MoeGrads moe_backward(const std::vector<Vector>& dy, const std::vector<Vector>& x,
                      const MoeForward& forward, const MoeWeights& weights, const MoeShape& shape,
                      const ExpertPartition& partition, const std::vector<Vector>& dscores = {},
                      const std::vector<Vector>& dlogits = {});

} // namespace bellows::reference
