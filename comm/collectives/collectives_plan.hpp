// SPDX-License-Identifier: MIT
#pragma once

// Which bytes of a collective go where, as plain values: the same on every rank of the group. A
// collective is a list of chunks; a chunk is a sum (every member brings every member's part), a
// gathering (every member brings its piece), or the one after the other. A list of moves has a plan
// of its own kind: its chunks are stretches of many ranges, and any member may give any other some.

#include <bellows/comm/collectives.hpp>

#include <cstdint>
#include <span>
#include <string_view>
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

/// One of the ranges that are summed in a target, or the only one, which is copied.
struct MoveTerm {
    std::uint64_t from = 0; ///< member
    std::uint64_t from_byte = 0;
};

/// What a member gets at one place.
struct MoveTarget {
    std::uint64_t to = 0; ///< member
    std::uint64_t to_byte = 0, bytes = 0;
    std::vector<MoveTerm> terms; ///< in the order of the list
};

/// A stretch of a target: the same bytes of all its terms.
struct MovePiece {
    std::size_t target = 0;
    std::uint64_t first = 0, bytes = 0;
};

/// The same on all members, whichever of them made it.
struct MovePlan {
    std::vector<MoveTarget> targets;
    /// No member sends to others, nor takes from others, more than chunk_bytes in a chunk, unless
    /// 16 bytes of all the terms of one target are more.
    std::vector<std::vector<MovePiece>> chunks;
};

/// sums: moves with the same target range are the terms of one sum. limits.self is not used. Throws
/// Error{InvalidArgument}, whose message begins with `who`, for a position that is not in the
/// group, a byte that is not a multiple of 4, a range that is too long to be one, or targets that
/// overlap (with sums: that are not the same).
MovePlan plan_moves(const PlanLimits& limits, std::span<const MemoryMove> moves, bool sums,
                    std::string_view who);

} // namespace bellows
