// SPDX-License-Identifier: MIT
#include <bellows/shape/expert_placement.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bellows {

namespace {

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, "placement of experts: " + why);
}

std::string text(std::uint64_t value) {
    return std::to_string(value);
}

void check_sizes(std::uint64_t experts, std::uint64_t ranks, std::uint64_t slots_of_rank) {
    if (experts == 0 || experts > kMostPlacedExperts)
        refuse("there must be 1 to " + text(kMostPlacedExperts) + " experts, not " + text(experts));
    if (ranks == 0 || ranks > kMostExpertSlots)
        refuse("there must be 1 to " + text(kMostExpertSlots) + " ranks, not " + text(ranks));
    if (slots_of_rank == 0 || slots_of_rank > kMostExpertSlots / ranks)
        refuse(text(ranks) + " ranks may have 1 to " + text(kMostExpertSlots / ranks) +
               " slots each, not " + text(slots_of_rank));
    if (ranks * slots_of_rank < experts)
        refuse(text(experts) + " experts do not fit into " + text(ranks) + " ranks of " +
               text(slots_of_rank) + " slots; a rank needs at least " +
               text(div_up(experts, ranks)));
}

void check_same_sizes(const ExpertPlacement& old, const ExpertPlacement& next) {
    validate(old);
    validate(next);
    const auto sizes = [](const ExpertPlacement& p) {
        return text(p.num_experts) + " experts on " + text(p.num_ranks) + " ranks of " +
               text(p.slots_of_rank) + " slots";
    };
    if (sizes(old) != sizes(next))
        refuse("the old one is of " + sizes(old) + ", the new one of " + sizes(next) +
               "; a change keeps the sizes");
}

} // namespace

ExpertPlacement plain_placement(std::uint64_t num_experts, std::uint64_t num_ranks,
                                std::uint64_t slots_of_rank) {
    if (slots_of_rank == 0 && num_ranks > 0)
        slots_of_rank = div_up(num_experts, num_ranks);
    check_sizes(num_experts, num_ranks, slots_of_rank);
    ExpertPlacement placement{num_experts, num_ranks, slots_of_rank,
                              std::vector<std::int32_t>(num_ranks * slots_of_rank, kFreeSlot)};
    for (std::uint64_t rank = 0; rank < num_ranks; ++rank) {
        const Share own = share_of(num_experts, num_ranks, rank);
        for (std::uint64_t i = 0; i < own.count; ++i)
            placement.expert_of_slot[rank * slots_of_rank + i] =
                static_cast<std::int32_t>(own.first + i);
    }
    return placement;
}

void validate(const ExpertPlacement& placement) {
    check_sizes(placement.num_experts, placement.num_ranks, placement.slots_of_rank);
    const std::uint64_t slots = placement.num_ranks * placement.slots_of_rank;
    if (placement.num_slots() != slots)
        refuse("the table has " + text(placement.num_slots()) + " entries; " +
               text(placement.num_ranks) + " ranks of " + text(placement.slots_of_rank) +
               " slots need " + text(slots));
    std::vector<bool> present(placement.num_experts, false);
    for (std::uint64_t slot = 0; slot < slots; ++slot) {
        const std::int32_t expert = placement.expert_of_slot[slot];
        if (expert == kFreeSlot)
            continue;
        if (expert < 0 || static_cast<std::uint64_t>(expert) >= placement.num_experts)
            refuse("slot " + text(slot) + " holds expert " + std::to_string(expert) +
                   "; experts are 0 to " + text(placement.num_experts - 1) + ", and " +
                   std::to_string(kFreeSlot) + " is a free slot");
        present[static_cast<std::size_t>(expert)] = true;
    }
    const auto absent = std::ranges::find(present, false);
    if (absent != present.end())
        refuse("expert " + std::to_string(absent - present.begin()) +
               " has no slot; every expert needs at least one");
}

std::string exchange_obstacle(const ExpertPlacement& placement) {
    for (std::uint64_t rank = 0; rank < placement.num_ranks; ++rank) {
        const auto of_rank = placement.of_rank(rank);
        std::vector<std::int32_t> experts(of_rank.begin(), of_rank.end());
        std::ranges::sort(experts);
        const auto free_until = std::ranges::upper_bound(experts, kFreeSlot);
        const auto twice = std::adjacent_find(free_until, experts.end());
        if (twice != experts.end())
            return "rank " + text(rank) + " holds expert " + std::to_string(*twice) +
                   " twice, and an exchange takes an expert at most once per rank; place with "
                   "distinct replicas, or make one of the two slots free (" +
                   std::to_string(kFreeSlot) + ")";
    }
    return "";
}

void validate_for_exchange(const ExpertPlacement& placement) {
    validate(placement);
    if (const std::string obstacle = exchange_obstacle(placement); !obstacle.empty())
        refuse(obstacle);
}

std::vector<ExpertPlacement> placements_of_tables(std::span<const std::vector<std::int32_t>> tables,
                                                  std::uint64_t num_experts,
                                                  std::uint64_t num_ranks) {
    std::vector<ExpertPlacement> placements;
    for (const std::vector<std::int32_t>& table : tables) {
        const std::string layer = "table " + text(placements.size()) + " ";
        if (table.size() != tables.front().size())
            refuse(layer + "has " + text(table.size()) + " slots, table 0 has " +
                   text(tables.front().size()) + "; all layers have as many");
        if (num_ranks == 0 || table.size() % num_ranks != 0)
            refuse(layer + "has " + text(table.size()) + " slots, which " + text(num_ranks) +
                   " ranks do not divide: each rank has as many");
        placements.push_back({num_experts, num_ranks, table.size() / num_ranks, table});
        try {
            validate_for_exchange(placements.back());
        } catch (const Error& error) {
            throw Error(error.code(), layer + "of " + error.message());
        }
    }
    return placements;
}

std::vector<std::uint64_t> slots_of_expert(const ExpertPlacement& placement, std::uint64_t expert) {
    if (expert >= placement.num_experts)
        refuse("there is no expert " + text(expert) + " among " + text(placement.num_experts));
    std::vector<std::uint64_t> slots;
    for (std::uint64_t slot = 0; slot < placement.num_slots(); ++slot)
        if (placement.expert_of_slot[slot] == static_cast<std::int32_t>(expert))
            slots.push_back(slot);
    return slots;
}

std::vector<std::uint32_t> replica_counts(const ExpertPlacement& placement) {
    std::vector<std::uint32_t> counts(placement.num_experts, 0);
    for (const std::int32_t expert : placement.expert_of_slot)
        if (expert != kFreeSlot)
            ++counts.at(static_cast<std::size_t>(expert));
    return counts;
}

std::vector<double> rank_loads(const ExpertPlacement& placement, std::span<const double> loads) {
    validate(placement);
    if (loads.size() != placement.num_experts)
        refuse("there are " + text(loads.size()) + " loads for " + text(placement.num_experts) +
               " experts");
    for (std::size_t expert = 0; expert < loads.size(); ++expert)
        if (!std::isfinite(loads[expert]) || loads[expert] < 0)
            refuse("the load of expert " + text(expert) + " is " + std::to_string(loads[expert]) +
                   "; loads are finite and at least 0");
    const std::vector<std::uint32_t> replicas = replica_counts(placement);
    std::vector<double> sums(placement.num_ranks, 0.0);
    for (std::uint64_t slot = 0; slot < placement.num_slots(); ++slot) {
        const std::int32_t expert = placement.expert_of_slot[slot];
        if (expert != kFreeSlot)
            sums[placement.rank_of(slot)] += loads[static_cast<std::size_t>(expert)] /
                                             replicas[static_cast<std::size_t>(expert)];
    }
    return sums;
}

double max_over_mean(std::span<const double> loads) {
    if (loads.empty())
        refuse("no loads have a mean");
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    return sum > 0 ? std::ranges::max(loads) / (sum / static_cast<double>(loads.size())) : 1.0;
}

ExpertPlacement keep_slots(const ExpertPlacement& old, const ExpertPlacement& wanted) {
    check_same_sizes(old, wanted);
    ExpertPlacement kept = wanted;
    std::ranges::fill(kept.expert_of_slot, kFreeSlot);
    for (std::uint64_t rank = 0; rank < wanted.num_ranks; ++rank) {
        const std::uint64_t first = rank * wanted.slots_of_rank;
        const auto had = old.of_rank(rank), want = wanted.of_rank(rank);
        const auto now = std::span(kept.expert_of_slot).subspan(first, wanted.slots_of_rank);
        // Those that stand in their slot already, ahead of their other replicas on the rank.
        std::vector<std::int32_t> coming;
        for (std::size_t at = 0; at < want.size(); ++at)
            if (want[at] == had[at])
                now[at] = want[at];
            else if (want[at] != kFreeSlot)
                coming.push_back(want[at]);
        for (std::size_t at = 0; at < had.size(); ++at) {
            const auto stays = std::ranges::find(coming, had[at]);
            if (now[at] == kFreeSlot && stays != coming.end()) {
                now[at] = had[at];
                coming.erase(stays);
            }
        }
        auto next = coming.begin();
        for (std::size_t at = 0; at < now.size() && next != coming.end(); ++at)
            if (now[at] == kFreeSlot)
                now[at] = *next++;
    }
    return kept;
}

std::vector<ExpertMove> expert_moves(const ExpertPlacement& old, const ExpertPlacement& next) {
    check_same_sizes(old, next);
    std::vector<std::vector<std::uint64_t>> holders(old.num_experts); // slots, ascending
    for (std::uint64_t slot = 0; slot < old.num_slots(); ++slot)
        if (old.expert_of_slot[slot] != kFreeSlot)
            holders[static_cast<std::size_t>(old.expert_of_slot[slot])].push_back(slot);
    std::vector<std::uint64_t> sent(old.num_ranks, 0);
    std::vector<ExpertMove> moves;
    for (std::uint64_t slot = 0; slot < next.num_slots(); ++slot) {
        const std::int32_t expert = next.expert_of_slot[slot];
        if (expert == kFreeSlot || expert == old.expert_of_slot[slot])
            continue;
        const std::uint64_t rank = next.rank_of(slot);
        const auto cost = [&](std::uint64_t from) { // nothing is sent inside a rank
            return old.rank_of(from) == rank ? 0 : 1 + sent[old.rank_of(from)];
        };
        const std::uint64_t from =
            *std::ranges::min_element(holders[static_cast<std::size_t>(expert)], {}, cost);
        moves.push_back({rank, slot, expert, old.rank_of(from), from});
        if (old.rank_of(from) != rank)
            ++sent[old.rank_of(from)];
    }
    return moves;
}

} // namespace bellows
