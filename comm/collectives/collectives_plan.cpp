// SPDX-License-Identifier: MIT
#include "collectives_plan.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>

namespace bellows {

namespace {

/// Parts and chunks begin at multiples of this, so that kernels can take four floats at a time.
constexpr std::uint64_t kAlignment = 16;

ByteRange intersection(const ByteRange& a, const ByteRange& b) {
    const std::uint64_t begin = std::clamp(a.begin, b.begin, b.end);
    return {begin, std::max(begin, std::min(a.end, b.end))};
}

} // namespace

std::vector<ChunkPlan> plan_all_reduce(const PlanLimits& limits, std::uint64_t elements) {
    const std::uint64_t bytes = elements * 4;
    std::vector<ChunkPlan> chunks;
    if (bytes == 0 || limits.members == 1)
        return chunks;
    if (bytes <= limits.small_bytes) {
        ChunkPlan chunk;
        chunk.parts.assign(limits.members, ByteRange{0, bytes});
        chunks.push_back(std::move(chunk));
        return chunks;
    }
    const std::uint64_t step = round_up(limits.chunk_bytes, kAlignment);
    for (std::uint64_t begin = 0; begin < bytes; begin += step) {
        const std::uint64_t end = std::min(begin + step, bytes);
        const std::uint64_t part = round_up(div_up(end - begin, limits.members), kAlignment);
        ChunkPlan chunk;
        for (std::uint64_t member = 0; member < limits.members; ++member)
            chunk.parts.push_back(
                {std::min(begin + member * part, end), std::min(begin + (member + 1) * part, end)});
        chunk.pieces = chunk.parts;
        chunk.sum_at = chunk.take_from = chunk.parts[limits.self].begin;
        chunks.push_back(std::move(chunk));
    }
    return chunks;
}

std::vector<ChunkPlan> plan_reduce_scatter(const PlanLimits& limits,
                                           std::span<const ByteRange> shares) {
    // A chunk takes the same stretch of every share.
    const std::uint64_t step =
        round_up(std::max<std::uint64_t>(limits.chunk_bytes / limits.members, 1), kAlignment);
    std::uint64_t longest = 0;
    for (const ByteRange& share : shares)
        longest = std::max(longest, share.size());
    std::vector<ChunkPlan> chunks;
    for (std::uint64_t begin = 0; begin < longest; begin += step) {
        ChunkPlan chunk;
        for (const ByteRange& share : shares)
            chunk.parts.push_back(
                intersection({share.begin + begin, share.begin + begin + step}, share));
        chunk.sum_at = chunk.parts[limits.self].begin - shares[limits.self].begin;
        chunks.push_back(std::move(chunk));
    }
    return chunks;
}

std::vector<ChunkPlan> plan_all_gather(const PlanLimits& limits,
                                       std::span<const ByteRange> shares) {
    const std::uint64_t step = round_up(limits.chunk_bytes, kAlignment);
    const std::uint64_t bytes = shares.empty() ? 0 : shares.back().end;
    std::vector<std::vector<ChunkPlan>> by_turn; // that a member's chunks have among its own
    std::size_t member = 0, turn = 0;
    for (std::uint64_t begin = 0; begin < bytes; begin += step, ++turn) {
        for (; shares[member].end <= begin; ++member)
            turn = 0;
        ChunkPlan chunk;
        for (const ByteRange& share : shares)
            chunk.pieces.push_back(intersection(share, {begin, std::min(begin + step, bytes)}));
        chunk.take_from = chunk.pieces[limits.self].begin - shares[limits.self].begin;
        by_turn.resize(std::max(by_turn.size(), turn + 1));
        by_turn[turn].push_back(std::move(chunk));
    }
    // All members send at a time.
    std::vector<ChunkPlan> chunks;
    for (std::vector<ChunkPlan>& same : by_turn)
        std::ranges::move(same, std::back_inserter(chunks));
    return chunks;
}

// ---- Moves -------------------------------------------------------------------------------------

namespace {

/// Most pieces of a chunk. They bound what it records.
constexpr std::size_t kMostPieces = 1024;
/// Of memory within a member, which needs no staging: what a kernel counts in 32 bits.
constexpr std::uint64_t kMostPieceBytes = std::uint64_t{1} << 30;

[[noreturn]] void refuse(std::string_view who, const std::string& message) {
    throw Error(ErrorCode::InvalidArgument, std::string(who) + ": " + message);
}

std::string describe(const MemoryMove& move) {
    return std::to_string(move.bytes) + " bytes from byte " + std::to_string(move.from_byte) +
           " of member " + std::to_string(move.from) + " to byte " + std::to_string(move.to_byte) +
           " of member " + std::to_string(move.to);
}

void check(const PlanLimits& limits, const MemoryMove& move, std::size_t index,
           std::string_view who) {
    const auto require = [&](bool good, const std::string& why) {
        if (!good)
            refuse(who, "move " + std::to_string(index) + ", " + describe(move) + ": " + why);
    };
    const auto member = [&](int position) {
        return position >= 0 && static_cast<std::uint64_t>(position) < limits.members;
    };
    require(member(move.from) && member(move.to),
            "the group has " + std::to_string(limits.members) + " members");
    require((move.from_byte | move.to_byte | move.bytes) % 4 == 0,
            "places and sizes must be multiples of 4 bytes");
    require(move.bytes <= UINT64_MAX - move.from_byte && move.bytes <= UINT64_MAX - move.to_byte,
            "no memory has so many bytes");
}

std::vector<MoveTarget> targets_of(const PlanLimits& limits, std::span<const MemoryMove> moves,
                                   bool sums, std::string_view who) {
    std::vector<MoveTarget> targets;
    std::map<std::pair<int, std::uint64_t>, std::size_t> by_place;
    for (std::size_t i = 0; i < moves.size(); ++i) {
        const MemoryMove& move = moves[i];
        check(limits, move, i, who);
        if (move.bytes == 0)
            continue;
        const auto [at, fresh] = by_place.try_emplace({move.to, move.to_byte}, targets.size());
        if (fresh)
            targets.push_back({static_cast<std::uint64_t>(move.to), move.to_byte, move.bytes, {}});
        MoveTarget& target = targets[at->second];
        if (!fresh && (!sums || target.bytes != move.bytes))
            refuse(who, "move " + std::to_string(i) + ", " + describe(move) +
                            ": another one brings " + std::to_string(target.bytes) +
                            " bytes to the same place");
        target.terms.push_back({static_cast<std::uint64_t>(move.from), move.from_byte});
    }
    const MoveTarget* last = nullptr;
    for (const auto& [place, index] : by_place) {
        const MoveTarget& target = targets[index];
        if (last != nullptr && last->to == target.to &&
            last->to_byte + last->bytes > target.to_byte)
            refuse(who, "moves to member " + std::to_string(target.to) +
                            " overlap: " + std::to_string(last->bytes) + " bytes at byte " +
                            std::to_string(last->to_byte) + " and " + std::to_string(target.bytes) +
                            " at byte " + std::to_string(target.to_byte));
        last = &target;
    }
    return targets;
}

/// The order in which chunks take the targets: each member's first one, then each one's second, so
/// that all members have something to send or to sum at a time.
std::vector<std::size_t> in_turns(std::uint64_t members, const std::vector<MoveTarget>& targets) {
    std::vector<std::uint64_t> copies(members, 0), sums(members, 0);
    std::vector<std::pair<std::uint64_t, std::size_t>> turns;
    for (std::size_t i = 0; i < targets.size(); ++i) {
        const MoveTarget& target = targets[i];
        turns.emplace_back(
            target.terms.size() == 1 ? copies[target.terms.front().from]++ : sums[target.to]++, i);
    }
    std::ranges::sort(turns);
    std::vector<std::size_t> order;
    for (const auto& [turn, index] : turns)
        order.push_back(index);
    return order;
}

/// What the members have left to send and to take in a chunk.
class ChunkRoom {
public:
    ChunkRoom(std::uint64_t members, std::uint64_t bytes)
        : bytes_(bytes), sent_(members, 0), taken_(members, 0), times_(members, 0) {}

    /// How many bytes of each term fit; whole: into an empty chunk.
    std::uint64_t fit(const MoveTarget& target, bool whole) {
        std::uint64_t foreign = 0, fit = kMostPieceBytes;
        for (const MoveTerm& term : target.terms)
            if (term.from != target.to) {
                ++times_[term.from];
                ++foreign;
            }
        const auto left = [&](std::uint64_t used) {
            return whole ? bytes_ : bytes_ - std::min(used, bytes_);
        };
        if (foreign > 0)
            fit = std::min(fit, left(taken_[target.to]) / foreign);
        for (const MoveTerm& term : target.terms)
            if (times_[term.from] > 0) {
                fit = std::min(fit, left(sent_[term.from]) / times_[term.from]);
                times_[term.from] = 0;
            }
        return fit;
    }
    void take(const MoveTarget& target, std::uint64_t bytes) {
        for (const MoveTerm& term : target.terms)
            if (term.from != target.to) {
                sent_[term.from] += bytes;
                taken_[target.to] += bytes;
            }
    }

private:
    std::uint64_t bytes_;
    std::vector<std::uint64_t> sent_, taken_, times_;
};

} // namespace

MovePlan plan_moves(const PlanLimits& limits, std::span<const MemoryMove> moves, bool sums,
                    std::string_view who) {
    MovePlan plan{targets_of(limits, moves, sums, who), {}};
    std::vector<std::size_t> open = in_turns(limits.members, plan.targets);
    std::vector<std::uint64_t> planned(plan.targets.size(), 0);
    // A chunk that is as good as full looks no further.
    const std::size_t most_misses = 64 * limits.members;
    while (!open.empty()) {
        ChunkRoom room(limits.members, round_up(limits.chunk_bytes, kAlignment));
        std::vector<MovePiece> pieces;
        std::size_t misses = 0;
        std::erase_if(open, [&](std::size_t index) {
            if (pieces.size() == kMostPieces || misses > most_misses)
                return false;
            const MoveTarget& target = plan.targets[index];
            const std::uint64_t rest = target.bytes - planned[index];
            const auto whole_lines = [&](std::uint64_t fit) { // unless it is the rest
                return fit >= rest ? rest : fit / kAlignment * kAlignment;
            };
            const std::uint64_t most =
                std::min(rest, std::max(whole_lines(room.fit(target, true)), kAlignment));
            const std::uint64_t bytes =
                pieces.empty() ? most : whole_lines(room.fit(target, false));
            if (bytes == 0 || (bytes < rest && bytes < most / 4)) { // no crumbs
                ++misses;
                return false;
            }
            room.take(target, bytes);
            pieces.push_back({index, planned[index], bytes});
            planned[index] += bytes;
            return planned[index] == target.bytes;
        });
        plan.chunks.push_back(std::move(pieces));
    }
    return plan;
}

} // namespace bellows
