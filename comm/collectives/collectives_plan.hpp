// SPDX-License-Identifier: MIT
#pragma once

// Which bytes of a collective go where, as plain values: the same on every rank of the group. A
// collective is a list of chunks; a chunk is a sum (every member brings every member's part), a
// gathering (every member brings its piece), or the one after the other.

#include <bellows/comm/collectives.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

/// Half-open.
struct ByteRange {
    std::uint64_t begin = 0, end = 0;

    std::uint64_t size() const noexcept { return end - begin; }
    bool empty() const noexcept { return end == begin; }
};

struct ChunkPlan {
    /// Of the source, per member: what it sums. Empty: nothing is summed. Equal ranges: everybody
    /// sums everything.
    std::vector<ByteRange> parts;
    std::uint64_t sum_at = 0; ///< byte of the target where this member's sum goes
    /// Of the target, per member: what it brings. Contiguous; empty: nothing is gathered.
    std::vector<ByteRange> pieces;
    std::uint64_t take_from = 0; ///< byte of the source where this member's piece stands
};

struct PlanLimits {
    std::uint64_t members = 1, self = 0;
    std::uint64_t chunk_bytes = 4u << 20;
    std::uint64_t small_bytes = 0;
};

/// In place, f32.
std::vector<ChunkPlan> plan_all_reduce(const PlanLimits& limits, std::uint64_t elements);
/// shares: in bytes of the source, contiguous from 0 on.
std::vector<ChunkPlan> plan_reduce_scatter(const PlanLimits& limits,
                                           std::span<const ByteRange> shares);
std::vector<ChunkPlan> plan_all_gather(const PlanLimits& limits, std::span<const ByteRange> shares);

} // namespace bellows
