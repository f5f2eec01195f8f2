// SPDX-License-Identifier: MIT
// That the chunks of a collective take every byte to whom it is for, once, and that all members
// have something to send from the first chunks on.
#include "comm/collectives/collectives_plan.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace bellows {
namespace {

constexpr std::uint64_t kChunk = 256;

std::vector<ByteRange> ranges_of(const std::vector<std::uint64_t>& sizes) {
    std::vector<ByteRange> ranges;
    std::uint64_t begin = 0;
    for (const std::uint64_t size : sizes) {
        ranges.push_back({begin, begin + size});
        begin += size;
    }
    return ranges;
}

const std::vector<std::vector<std::uint64_t>> kShares{
    {1024, 1024, 1024, 1024}, {1040, 0, 2000, 36}, {0, 0, 3000, 0}, {4, 4, 4, 4}, {5000, 256}, {0}};

/// plan(limits, shares) of each member.
template <class Plan>
std::vector<std::vector<ChunkPlan>> of_members(const std::vector<ByteRange>& shares, Plan plan) {
    std::vector<std::vector<ChunkPlan>> plans;
    for (std::uint64_t self = 0; self < shares.size(); ++self)
        plans.push_back(plan(
            PlanLimits{.members = shares.size(), .self = self, .chunk_bytes = kChunk}, shares));
    return plans;
}

TEST(PlanAllGather, TakesEveryByteOnce) {
    for (const auto& sizes : kShares) {
        const auto shares = ranges_of(sizes);
        const auto plans = of_members(shares, [](const PlanLimits& limits, const auto& of) {
            return plan_all_gather(limits, of);
        });
        std::vector<int> taken(shares.back().end, 0);
        for (std::size_t i = 0; i < plans[0].size(); ++i) {
            const ChunkPlan& chunk = plans[0][i];
            ASSERT_EQ(chunk.pieces.size(), shares.size());
            EXPECT_TRUE(chunk.parts.empty());
            EXPECT_LE(chunk.pieces.back().end - chunk.pieces.front().begin, kChunk);
            for (std::size_t member = 0; member < shares.size(); ++member) {
                const ByteRange& piece = chunk.pieces[member];
                for (std::uint64_t byte = piece.begin; byte < piece.end; ++byte) {
                    ++taken[byte];
                    EXPECT_TRUE(byte >= shares[member].begin && byte < shares[member].end);
                }
                const ChunkPlan& own = plans[member][i];
                EXPECT_EQ(own.pieces[member].begin, piece.begin) << "the same for all";
                if (!piece.empty()) {
                    EXPECT_EQ(own.take_from, piece.begin - shares[member].begin);
                }
            }
        }
        EXPECT_EQ(taken, std::vector<int>(taken.size(), 1));
    }
}

TEST(PlanAllGather, AllMembersSendAtATime) {
    const auto shares = ranges_of({1024, 1024, 1024, 1024});
    const auto chunks = plan_all_gather({.members = 4, .self = 0, .chunk_bytes = kChunk}, shares);
    ASSERT_EQ(chunks.size(), 16u);
    for (std::size_t i = 0; i < chunks.size(); ++i)
        EXPECT_FALSE(chunks[i].pieces[i % 4].empty()) << i;
}

TEST(PlanReduceScatter, SumsEveryByteOnceAtItsPlace) {
    for (const auto& sizes : kShares) {
        const auto shares = ranges_of(sizes);
        const auto plans = of_members(shares, [](const PlanLimits& limits, const auto& of) {
            return plan_reduce_scatter(limits, of);
        });
        std::vector<int> summed(shares.back().end, 0);
        for (std::size_t i = 0; i < plans[0].size(); ++i) {
            const ChunkPlan& chunk = plans[0][i];
            ASSERT_EQ(chunk.parts.size(), shares.size());
            std::uint64_t bytes = 0;
            for (std::size_t member = 0; member < shares.size(); ++member) {
                const ByteRange& part = chunk.parts[member];
                bytes += part.size();
                for (std::uint64_t byte = part.begin; byte < part.end; ++byte)
                    ++summed[byte];
                EXPECT_EQ(plans[member][i].parts[member].begin, part.begin);
                if (!part.empty()) {
                    EXPECT_EQ(plans[member][i].sum_at, part.begin - shares[member].begin);
                }
            }
            EXPECT_LE(bytes, kChunk);
        }
        EXPECT_EQ(summed, std::vector<int>(summed.size(), 1));
    }
}

} // namespace
} // namespace bellows
