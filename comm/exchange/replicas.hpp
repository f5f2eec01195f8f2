// SPDX-License-Identifier: MIT
#pragma once

// Which slots of which ranks hold an expert: a table, the same on every rank, and what a source
// makes of it. Plain values.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

class Replicas {
public:
    /// Contiguous blocks of experts, as even as can be, in the first slots of each rank.
    Replicas(std::uint64_t experts, std::uint64_t ranks, std::uint64_t slots_per_rank);

    /// Throws Error{InvalidArgument}, with `name`, unless the table has a number for each slot, -1
    /// or an expert, and each expert a slot, and at most one on a rank.
    void set(std::span<const std::int32_t> expert_of_slot, const std::string& name);

    std::span<const std::int32_t> expert_of_slot() const noexcept { return expert_of_slot_; }
    /// Positions of the ranks that hold an expert, ascending.
    std::vector<int> owners(std::uint64_t expert) const;
    /// Words for the kernel exchange_replicas at the rank of a position: of each expert its own
    /// slot, else those of its node, else all; of ranks that are not live only where no other has
    /// it. near, live: of each rank.
    std::vector<std::uint32_t> words(std::uint64_t position, const std::vector<bool>& near,
                                     const std::vector<bool>& live) const;

private:
    std::uint64_t experts_, slots_per_rank_;
    std::vector<std::int32_t> expert_of_slot_;
};

} // namespace bellows
