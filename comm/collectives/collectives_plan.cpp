// SPDX-License-Identifier: MIT
#include "collectives_plan.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <iterator>
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

} // namespace bellows
