// SPDX-License-Identifier: MIT
#pragma once

// Which rank holds which experts of one MoE layer, as a table. Logical experts are those of the
// model; a rank has a fixed number of physical slots, and each holds one replica of an expert or is
// free. Ids and loads are always logical. Pure functions and plain values, any thread: ranks that
// call them with the same values get the same table. Tables come from plain_placement() or from
// rebalance_experts() (eplb.hpp).

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// What stands in a slot that holds no expert.
inline constexpr std::int32_t kFreeSlot = -1;

/// The most experts and the most slots of all ranks that a table may have.
inline constexpr std::uint64_t kMostPlacedExperts = 65536, kMostExpertSlots = 1048576;

/// The table of one layer. Slots are counted over all ranks, those of rank 0 first.
struct ExpertPlacement {
    std::uint64_t num_experts = 0; ///< logical ones
    std::uint64_t num_ranks = 0;
    std::uint64_t slots_of_rank = 0;          ///< every rank has as many
    std::vector<std::int32_t> expert_of_slot; ///< [num_ranks * slots_of_rank], kFreeSlot: none

    std::uint64_t num_slots() const noexcept { return expert_of_slot.size(); }
    std::uint64_t rank_of(std::uint64_t slot) const noexcept { return slot / slots_of_rank; }
    /// The slots of one rank. rank < num_ranks.
    std::span<const std::int32_t> of_rank(std::uint64_t rank) const {
        return std::span(expert_of_slot).subspan(rank * slots_of_rank, slots_of_rank);
    }
    bool operator==(const ExpertPlacement&) const = default;
};

/// Every expert once, in contiguous blocks in the order of the ranks; where the ranks do not divide
/// the experts, the first num_experts % num_ranks ranks hold one more. This is where the exchange
/// has its experts. slots_of_rank: at least the largest block; 0 means as many as that. Slots
/// behind a block are free. Throws Error{InvalidArgument} for sizes that do not fit together.
ExpertPlacement plain_placement(std::uint64_t num_experts, std::uint64_t num_ranks,
                                std::uint64_t slots_of_rank = 0);

/// Throws Error{InvalidArgument} unless sizes are those of the table and within the limits, every
/// entry is an expert or kFreeSlot, and every expert has a slot. Two replicas of an expert on one
/// rank are allowed, see exchange_obstacle().
void validate(const ExpertPlacement& placement);

/// Why an exchange cannot use a placement that validate() takes: the first rank that holds an
/// expert twice, and the way out. Empty if it can.
std::string exchange_obstacle(const ExpertPlacement& placement);
/// validate(), then Error{InvalidArgument} with the obstacle if there is one.
void validate_for_exchange(const ExpertPlacement& placement);

/// The tables of some layers as `bellows plan experts` prints them (physical_to_logical), in the
/// order of the layers: which expert each slot of all ranks holds, or kFreeSlot. Throws
/// Error{InvalidArgument} with the layer unless the ranks divide the slots, of which all layers
/// have as many, and validate_for_exchange() takes each table.
std::vector<ExpertPlacement> placements_of_tables(std::span<const std::vector<std::int32_t>> tables,
                                                  std::uint64_t num_experts,
                                                  std::uint64_t num_ranks);

/// The slots that hold an expert, ascending. Throws Error{InvalidArgument} if there is no such
/// expert.
std::vector<std::uint64_t> slots_of_expert(const ExpertPlacement& placement, std::uint64_t expert);

/// Replicas of each expert. [num_experts]
std::vector<std::uint32_t> replica_counts(const ExpertPlacement& placement);

/// What each rank has to do: each replica takes load / replicas of its expert's load, and a rank
/// the sum over its slots in ascending order. loads: [num_experts], any unit, at least 0 and
/// finite. Returns [num_ranks]. Throws Error{InvalidArgument}.
std::vector<double> rank_loads(const ExpertPlacement& placement, std::span<const double> loads);

/// The largest load divided by the mean: 1 is perfect balance. 1 where all loads are 0. Throws
/// Error{InvalidArgument} if there are none.
double max_over_mean(std::span<const double> loads);

/// A replica that a change of placement brings into a slot.
struct ExpertMove {
    std::uint64_t rank = 0, slot = 0; ///< where it goes; the slot counts over all ranks
    std::int32_t expert = 0;
    std::uint64_t from_rank = 0, from_slot = 0; ///< where the old placement has it

    bool operator==(const ExpertMove&) const = default;
};

/// `wanted` with the slots of each rank permuted, so that an expert that stays on a rank keeps the
/// slot that it has in `old`. All others of the rank take the slots that are left, in the order in
/// which they stand in `wanted`, both ascending. No other permutation inside ranks has fewer
/// moves. Throws Error{InvalidArgument} unless both have the same sizes and are valid.
ExpertPlacement keep_slots(const ExpertPlacement& old, const ExpertPlacement& wanted);

/// What has to be copied to go from one placement to another, by ascending slot. All of it is read
/// from the old placement. An expert comes from a slot of its new rank if it has one there, else
/// from the rank that has sent the fewest so far, of equals the lowest, and there from its lowest
/// slot. A slot that becomes free is no move. Throws Error{InvalidArgument} as keep_slots() does.
std::vector<ExpertMove> expert_moves(const ExpertPlacement& old, const ExpertPlacement& next);

} // namespace bellows
