// SPDX-License-Identifier: MIT
// That the chunks of a collective take every byte to whom it is for, once, and that all members
// have something to send from the first chunks on.
#include "comm/collectives/collectives_plan.hpp"

#include <bellows/base/error.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
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

// ---- Moves -------------------------------------------------------------------------------------

using Moves = std::vector<MemoryMove>;

PlanLimits four_members(std::uint64_t chunk_bytes = kChunk) {
    return {.members = 4, .self = 0, .chunk_bytes = chunk_bytes};
}

/// Every other expert of `members` ranks goes to several slots, some of its own rank; with sums the
/// way back.
Moves table_of(std::uint64_t seed, int members, bool sums) {
    std::mt19937_64 random(seed);
    Moves moves;
    std::vector<std::uint64_t> end(static_cast<std::size_t>(members), 0); // of each target
    for (int i = 0; i < 40; ++i) {
        MemoryMove move;
        move.bytes = random() % 5 == 0 ? random() % 2 * 4 : random() % 300 * 4;
        move.from_byte = random() % 1000 * 4;
        move.to = static_cast<int>(random() % static_cast<std::uint64_t>(members));
        move.to_byte = end[static_cast<std::size_t>(move.to)] + random() % 3 * 4;
        end[static_cast<std::size_t>(move.to)] = move.to_byte + move.bytes;
        for (std::uint64_t term = sums ? random() % 5 : 0; term != UINT64_MAX; --term) {
            move.from = static_cast<int>(random() % static_cast<std::uint64_t>(members));
            move.from_byte += random() % 7 * 4;
            moves.push_back(move);
        }
    }
    if (sums) // the terms of a sum need not stand together
        std::shuffle(moves.begin(), moves.end(), random);
    return moves;
}

/// Where the terms of every word of a member's target come from, in order.
using Sources = std::map<std::uint64_t, std::vector<std::pair<std::uint64_t, std::uint64_t>>>;

std::vector<Sources> sources_of(const Moves& moves, std::size_t members) {
    std::vector<Sources> of(members);
    for (const MemoryMove& move : moves)
        for (std::uint64_t byte = 0; byte < move.bytes; byte += 4)
            of[static_cast<std::size_t>(move.to)][move.to_byte + byte].emplace_back(
                move.from, move.from_byte + byte);
    return of;
}

std::vector<Sources> sources_of(const MovePlan& plan, std::size_t members) {
    std::vector<Sources> of(members);
    for (const auto& chunk : plan.chunks)
        for (const MovePiece& piece : chunk) {
            const MoveTarget& target = plan.targets[piece.target];
            EXPECT_TRUE(piece.bytes > 0 && (piece.first | piece.bytes) % 4 == 0);
            for (std::uint64_t byte = piece.first; byte < piece.first + piece.bytes; byte += 4) {
                auto& terms = of[target.to][target.to_byte + byte];
                EXPECT_TRUE(terms.empty()) << "planned twice";
                for (const MoveTerm& term : target.terms)
                    terms.emplace_back(term.from, term.from_byte + byte);
            }
        }
    return of;
}

/// Most bytes that a member sends to others or takes from others in a chunk.
std::uint64_t fullest(const MovePlan& plan, const std::vector<MovePiece>& chunk,
                      std::size_t members) {
    std::vector<std::uint64_t> sent(members, 0), taken(members, 0);
    for (const MovePiece& piece : chunk)
        for (const MoveTerm& term : plan.targets[piece.target].terms)
            if (term.from != plan.targets[piece.target].to) {
                sent[term.from] += piece.bytes;
                taken[plan.targets[piece.target].to] += piece.bytes;
            }
    return std::max(*std::ranges::max_element(sent), *std::ranges::max_element(taken));
}

TEST(PlanMoves, TakesEveryWordOnceWithItsTermsInTheOrderOfTheList) {
    for (const bool sums : {false, true})
        for (const int members : {1, 2, 4})
            for (std::uint64_t seed = 0; seed < 6; ++seed)
                for (const std::uint64_t chunk : {16u, 256u, 4096u, 1u << 20}) {
                    const Moves moves = table_of(seed, members, sums);
                    const auto count = static_cast<std::size_t>(members);
                    const PlanLimits limits{.members = count, .self = 0, .chunk_bytes = chunk};
                    const MovePlan plan = plan_moves(limits, moves, sums, "test");
                    ASSERT_EQ(sources_of(plan, count), sources_of(moves, count))
                        << "members " << members << ", seed " << seed << ", chunks of " << chunk;
                    std::size_t most_terms = 0;
                    for (const MoveTarget& target : plan.targets)
                        most_terms = std::max(most_terms, target.terms.size());
                    for (const auto& pieces : plan.chunks) {
                        ASSERT_FALSE(pieces.empty());
                        ASSERT_LE(fullest(plan, pieces, count),
                                  std::max<std::uint64_t>(chunk, 16 * most_terms));
                    }
                }
}

TEST(PlanMoves, IsTheSameForAllMembers) {
    const Moves moves = table_of(3, 4, true);
    const MovePlan first = plan_moves(four_members(), moves, true, "test");
    for (std::uint64_t self = 1; self < 4; ++self) {
        PlanLimits limits = four_members();
        limits.self = self;
        const MovePlan plan = plan_moves(limits, moves, true, "test");
        ASSERT_EQ(plan.chunks.size(), first.chunks.size());
        for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
            ASSERT_EQ(plan.chunks[i].size(), first.chunks[i].size());
            for (std::size_t k = 0; k < plan.chunks[i].size(); ++k) {
                EXPECT_EQ(plan.chunks[i][k].target, first.chunks[i][k].target);
                EXPECT_EQ(plan.chunks[i][k].first, first.chunks[i][k].first);
                EXPECT_EQ(plan.chunks[i][k].bytes, first.chunks[i][k].bytes);
            }
        }
    }
}

/// A list that has all of one member's moves behind all of another's still keeps all busy.
TEST(PlanMoves, AllMembersSendAtATime) {
    Moves moves;
    for (int from = 0; from < 4; ++from)
        for (std::uint64_t i = 0; i < 500; ++i)
            moves.push_back({from, (from + 1) % 4, i * kChunk, i * kChunk, kChunk});
    const MovePlan plan = plan_moves(four_members(), moves, false, "test");
    ASSERT_EQ(plan.chunks.size(), 500u);
    for (const auto& pieces : plan.chunks)
        ASSERT_EQ(pieces.size(), 4u);
}

/// Chunks are not many more than the bytes of the busiest member need.
TEST(PlanMoves, ChunksAreFull) {
    for (const bool sums : {false, true}) {
        const Moves moves = table_of(5, 4, sums);
        const MovePlan plan = plan_moves(four_members(4096), moves, sums, "test");
        std::uint64_t busiest = 0;
        std::vector<std::uint64_t> sent(4, 0), taken(4, 0);
        for (const MemoryMove& move : moves)
            if (move.from != move.to) {
                busiest =
                    std::max(busiest, sent[static_cast<std::size_t>(move.from)] += move.bytes);
                busiest = std::max(busiest, taken[static_cast<std::size_t>(move.to)] += move.bytes);
            }
        EXPECT_LE(plan.chunks.size(), 2 * busiest / 4096 + 1);
    }
}

TEST(PlanMoves, NothingMovesNothing) {
    EXPECT_TRUE(plan_moves(four_members(), {}, false, "test").chunks.empty());
    const Moves empty{{0, 1, 0, 0, 0}, {1, 1, 8, 0, 0}};
    EXPECT_TRUE(plan_moves(four_members(), empty, true, "test").chunks.empty());
}

TEST(PlanMoves, RefusesWhatDoesNotFit) {
    constexpr std::uint64_t kEnd = UINT64_MAX - 3;
    const struct {
        const char* what;
        Moves moves;
        bool good_of_sums;
    } cases[]{
        {"from below", {{-1, 0, 0, 0, 4}}, false},
        {"from beyond", {{4, 0, 0, 0, 4}}, false},
        {"to below", {{0, -1, 0, 0, 4}}, false},
        {"to beyond", {{0, 4, 0, 0, 4}}, false},
        {"to beyond without bytes", {{0, 4, 0, 0, 0}}, false},
        {"odd source", {{0, 1, 2, 0, 4}}, false},
        {"odd target", {{0, 1, 0, 2, 4}}, false},
        {"odd size", {{0, 1, 0, 0, 6}}, false},
        {"endless source", {{0, 1, kEnd, 0, 4}}, false},
        {"endless target", {{0, 1, 0, kEnd, 8}}, false},
        {"same target", {{0, 1, 0, 0, 8}, {2, 1, 0, 0, 8}}, true},
        {"same begin", {{0, 1, 0, 0, 8}, {2, 1, 0, 0, 4}}, false},
        {"same end", {{0, 1, 0, 0, 8}, {2, 1, 0, 4, 4}}, false},
        {"overlapping", {{0, 1, 0, 8, 8}, {2, 1, 0, 0, 12}}, false},
    };
    for (const auto& one : cases)
        for (const bool sums : {false, true}) {
            bool refused = false;
            try {
                plan_moves(four_members(), one.moves, sums, "who");
            } catch (const Error& error) {
                refused = error.code() == ErrorCode::InvalidArgument &&
                          std::string(error.message()).starts_with("who: move");
            }
            EXPECT_EQ(refused, !(sums && one.good_of_sums)) << one.what << ", sums " << sums;
        }
    // Ranges that touch, and the same range at different members.
    const Moves good{{0, 1, 0, 0, 8}, {0, 1, 0, 8, 8}, {0, 2, 0, 0, 8}};
    EXPECT_EQ(plan_moves(four_members(), good, false, "who").targets.size(), 3u);
}

} // namespace
} // namespace bellows
