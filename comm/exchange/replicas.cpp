// SPDX-License-Identifier: MIT
#include "replicas.hpp"

#include "exchange_sizes.hpp"

#include <functional>

namespace bellows {

Replicas::Replicas(std::uint64_t experts, std::uint64_t ranks, std::uint64_t slots_per_rank)
    : experts_(experts), slots_per_rank_(slots_per_rank),
      expert_of_slot_(ranks * slots_per_rank, -1) {
    for (std::uint64_t at = 0; at < ranks; ++at) {
        const std::uint64_t first = first_expert(at, experts, ranks),
                            end = first_expert(at + 1, experts, ranks);
        for (std::uint64_t expert = first; expert < end; ++expert)
            expert_of_slot_[at * slots_per_rank + expert - first] =
                static_cast<std::int32_t>(expert);
    }
}

void Replicas::set(std::span<const std::int32_t> expert_of_slot, const std::string& name) {
    require(expert_of_slot.size() == expert_of_slot_.size(), name,
            "a placement of " + std::to_string(expert_of_slot.size()) + " slots, but there are " +
                std::to_string(expert_of_slot_.size()));
    constexpr std::uint64_t kNowhere = ~std::uint64_t{0};
    std::vector<std::uint64_t> last(experts_, kNowhere); // rank that holds it
    for (std::uint64_t slot = 0; slot < expert_of_slot.size(); ++slot) {
        const std::int32_t expert = expert_of_slot[slot];
        const std::uint64_t rank = slot / slots_per_rank_;
        const std::string where = "slot " + std::to_string(slot % slots_per_rank_) + " of rank " +
                                  std::to_string(rank) + " holds expert " + std::to_string(expert);
        if (expert == -1)
            continue;
        require(expert >= 0 && static_cast<std::uint64_t>(expert) < experts_, name,
                where + ", but experts are 0 to " + std::to_string(experts_ - 1) +
                    " (-1: an empty slot)");
        require(last[static_cast<std::uint64_t>(expert)] != rank, name,
                where + ", which that rank has already: an expert has one slot of a rank at most");
        last[static_cast<std::uint64_t>(expert)] = rank;
    }
    for (std::uint64_t expert = 0; expert < experts_; ++expert)
        require(last[expert] != kNowhere, name,
                "no slot holds expert " + std::to_string(expert) + ": each must have one at least");
    expert_of_slot_.assign(expert_of_slot.begin(), expert_of_slot.end());
}

std::vector<int> Replicas::owners(std::uint64_t expert) const {
    std::vector<int> owners;
    for (std::uint64_t slot = 0; slot < expert_of_slot_.size(); ++slot)
        if (expert_of_slot_[slot] == static_cast<std::int64_t>(expert))
            owners.push_back(static_cast<int>(slot / slots_per_rank_));
    return owners;
}

std::vector<std::uint32_t> Replicas::words(std::uint64_t position, const std::vector<bool>& near,
                                           const std::vector<bool>& live) const {
    std::vector<std::vector<std::uint32_t>> slots(experts_);
    for (std::uint64_t slot = 0; slot < expert_of_slot_.size(); ++slot)
        if (expert_of_slot_[slot] >= 0)
            slots[static_cast<std::uint64_t>(expert_of_slot_[slot])].push_back(
                static_cast<std::uint32_t>(slot));
    // Narrows the choice down, unless nothing would be left.
    const auto prefer = [&](std::vector<std::uint32_t>& some,
                            const std::function<bool(std::uint64_t)>& good) {
        std::vector<std::uint32_t> left;
        for (const std::uint32_t slot : some)
            if (good(slot / slots_per_rank_))
                left.push_back(slot);
        if (!left.empty())
            some = std::move(left);
    };
    std::vector<std::uint32_t> words(2 * experts_);
    for (std::uint64_t expert = 0; expert < experts_; ++expert) {
        std::vector<std::uint32_t>& some = slots[expert];
        prefer(some, [&](std::uint64_t rank) { return live[rank]; });
        prefer(some, [&](std::uint64_t rank) { return near[rank]; });
        prefer(some, [&](std::uint64_t rank) { return rank == position; });
        words[2 * expert] = static_cast<std::uint32_t>(words.size());
        words[2 * expert + 1] = static_cast<std::uint32_t>(some.size());
        words.insert(words.end(), some.begin(), some.end());
    }
    return words;
}

} // namespace bellows
