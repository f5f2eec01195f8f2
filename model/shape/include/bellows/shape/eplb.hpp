// SPDX-License-Identifier: MIT
#pragma once

// Balanced placement of experts with replicas: the algorithm of DeepSeek's EPLB
// (github.com/deepseek-ai/EPLB), and what it does not cover. Pure functions, any thread.
//
// Experts with a high load get replicas, among which their load is shared evenly, and replicas are
// packed so that ranks have about the same load. Where groups of experts can be dealt out evenly to
// nodes (the nodes divide the groups), each group stays on one node, so that routing limited to few
// groups stays on few nodes (hierarchical); otherwise nodes and groups are left out of account
// (global).
//
// Where the original has a result, this is that result: replicas fill the ranks exactly, and
// `distinct` is off. It may then put two replicas of an expert on one rank, which balances nothing
// and which no exchange takes (exchange_obstacle()). With `distinct`, and whenever the ranks do not
// divide the replicas, the rules go further:
//   * An expert gets at most as many replicas as there are ranks that it may stand on. Replicas
//     that are left over then are not made; their slots stay free.
//   * A replica goes to the least loaded rank that has room and does not hold the expert. Where no
//     rank with room is without it, an expert of a full rank moves to a rank with room and makes
//     place; of all such pairs of ranks and experts it is the one whose higher load is lowest.
//     So no rank ever holds an expert twice.
//   * Where nodes do not divide the replicas, the first nodes have one more.
//
// Everything is f64 and goes in a fixed order; whatever is equal is taken by the lowest index. (The
// original computes in f32 and leaves the order of equals open.)

#include <bellows/shape/expert_placement.hpp>

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace bellows {

/// Where each item went, and how many of its pack were there before it. Both [num_items].
struct BalancedPacks {
    std::vector<std::uint32_t> pack, place;
};

/// Deals items out to packs of equal size: the heaviest first, each to the lightest pack that has
/// room. With one item per pack, item i is pack i. weights: [num_items], finite, at least 0. Throws
/// Error{InvalidArgument} unless packs divides their number.
BalancedPacks balanced_packing(std::span<const double> weights, std::uint64_t packs);

/// Replicas of experts: first one of each, in their order, then the additional ones.
struct ExpertReplicas {
    std::vector<std::uint32_t> expert;  ///< [replicas]
    std::vector<std::uint32_t> replica; ///< [replicas] how many of the same expert stand before it
    std::vector<std::uint32_t> count;   ///< [experts]
};

/// Each additional replica goes to the expert with the highest load / replicas, which makes the
/// highest share as low as it can be. most: replicas that an expert may have; where all have as
/// many, there are fewer than `replicas` in all. Throws Error{InvalidArgument} if there are fewer
/// replicas than experts, or for loads that rebalance_experts() refuses.
ExpertReplicas replicate_experts(std::span<const double> loads, std::uint64_t replicas,
                                 std::uint64_t most = std::numeric_limits<std::uint64_t>::max());

struct EplbOptions {
    std::uint64_t groups = 1; ///< of experts, of equal size, that routing chooses among
    std::uint64_t nodes = 1;  ///< hosts, with as many ranks each
    std::uint64_t ranks = 1;
    std::uint64_t replicas = 0; ///< in all; a rank has replicas / ranks slots, rounded up
    bool distinct = false;      ///< no expert twice on a rank, as exchanges need it
};

struct BalancedExperts {
    ExpertPlacement placement;
    /// [slots] which of its expert's replicas a slot holds, in the order in which they were made;
    /// -1: the slot is free.
    std::vector<std::int32_t> replica_of_slot;
};

/// Whether the groups stay on nodes: nodes divide them.
bool is_hierarchical(const EplbOptions& options) noexcept;

/// The placement of one layer. loads: [num_experts], measured or expected, in any unit. Throws
/// Error{InvalidArgument} for a load that is negative or not finite, for a sum that is not finite,
/// for fewer replicas than experts, and for groups or nodes that do not divide experts or ranks.
BalancedExperts rebalance_experts(std::span<const double> loads, const EplbOptions& options);

} // namespace bellows
