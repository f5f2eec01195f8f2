// SPDX-License-Identifier: MIT
// The table of experts by slots: the plain one is the exchange's, what is broken is refused, loads
// add up, and a change of placement moves as little as it can.
#include <bellows/shape/expert_placement.hpp>

#include "comm/exchange/exchange_sizes.hpp"
#include "shape/refusal.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace bellows {
namespace {

using Table = std::vector<std::int32_t>;

TEST(PlainPlacement, IsWhereTheExchangeHasItsExperts) {
    for (const std::uint64_t experts : {1, 2, 5, 7, 8, 30, 64, 256})
        for (const std::uint64_t ranks : {1, 2, 3, 4, 7, 8, 32}) {
            const ExpertPlacement plain = plain_placement(experts, ranks);
            validate_for_exchange(plain);
            EXPECT_EQ(plain.slots_of_rank, (experts + ranks - 1) / ranks);
            for (std::uint64_t rank = 0; rank < ranks; ++rank) {
                const std::uint64_t first = first_expert(rank, experts, ranks);
                const std::uint64_t end = first_expert(rank + 1, experts, ranks);
                for (std::uint64_t i = 0; i < plain.slots_of_rank; ++i)
                    EXPECT_EQ(plain.of_rank(rank)[i],
                              first + i < end ? static_cast<std::int32_t>(first + i) : kFreeSlot)
                        << experts << " experts, " << ranks << " ranks, rank " << rank;
            }
        }
}

TEST(PlainPlacement, LeavesRoomForReplicas) {
    EXPECT_EQ(plain_placement(5, 2, 4).expert_of_slot, (Table{0, 1, 2, -1, 3, 4, -1, -1}));
    EXPECT_EQ(plain_placement(2, 3).expert_of_slot, (Table{0, 1, -1}));
    EXPECT_NE(refusal([] { plain_placement(5, 2, 2); }).find("a rank needs at least 3"),
              std::string::npos);
    EXPECT_NE(refusal([] { plain_placement(0, 2); }).find("experts, not 0"), std::string::npos);
    EXPECT_NE(refusal([] { plain_placement(4, 0); }).find("ranks, not 0"), std::string::npos);
    EXPECT_NE(refusal([] { plain_placement(4, 1u << 20, 2); }).find("slots each, not 2"),
              std::string::npos);
    const std::uint64_t huge = std::numeric_limits<std::uint64_t>::max();
    EXPECT_NE(refusal([&] { plain_placement(huge, huge, huge); }), "");
    EXPECT_NE(refusal([&] { plain_placement(4, huge); }), "");
    EXPECT_NE(refusal([&] { plain_placement(4, 2, huge); }), "");
}

TEST(ExpertPlacement, RefusesBrokenTables) {
    const auto of = [](const ExpertPlacement& placement) {
        return refusal([&] { validate(placement); });
    };
    const ExpertPlacement good{3, 2, 2, {0, 1, 2, -1}};
    EXPECT_EQ(of(good), "");
    ExpertPlacement bad = good;
    bad.expert_of_slot = {0, 1, 1, -1};
    EXPECT_NE(of(bad).find("expert 2 has no slot"), std::string::npos) << of(bad);
    bad.expert_of_slot = {0, 1, 2, 3};
    EXPECT_NE(of(bad).find("slot 3 holds expert 3; experts are 0 to 2"), std::string::npos)
        << of(bad);
    bad.expert_of_slot = {0, 1, 2, -2};
    EXPECT_NE(of(bad).find("slot 3 holds expert -2"), std::string::npos) << of(bad);
    bad.expert_of_slot = {0, 1, 2};
    EXPECT_NE(of(bad).find("has 3 entries; 2 ranks of 2 slots need 4"), std::string::npos)
        << of(bad);
    bad = good;
    bad.slots_of_rank = 1;
    EXPECT_NE(of(bad).find("3 experts do not fit"), std::string::npos) << of(bad);
    EXPECT_NE(of(ExpertPlacement{}), "");
}

TEST(ExpertPlacement, SaysWhatAnExchangeCannotUse) {
    EXPECT_EQ(exchange_obstacle({3, 2, 3, {0, 1, -1, 2, 1, -1}}), "");
    const ExpertPlacement twice{3, 2, 3, {0, 1, -1, 2, 1, 2}};
    validate(twice);
    EXPECT_NE(exchange_obstacle(twice).find("rank 1 holds expert 2 twice"), std::string::npos)
        << exchange_obstacle(twice);
    EXPECT_NE(refusal([&] { validate_for_exchange(twice); }).find("expert 2 twice"),
              std::string::npos);
}

TEST(ExpertPlacement, ComesFromTablesOfLayers) {
    const std::vector<Table> tables = {{0, 1, 2, 0}, {2, 1, 0, -1}};
    const auto of = [](const std::vector<Table>& some) {
        return refusal([&] { (void)placements_of_tables(some, 3, 2); });
    };
    EXPECT_EQ(placements_of_tables(tables, 3, 2)[1], (ExpertPlacement{3, 2, 2, tables[1]}));
    EXPECT_NE(of({{0, 1, 2}}).find("table 0 has 3 slots, which 2 ranks do not divide"),
              std::string::npos);
    EXPECT_NE(of({tables[0], {0, 1, 2, 0, 1, 2}}).find("table 1 has 6 slots, table 0 has 4"),
              std::string::npos);
    EXPECT_NE(of({tables[0], {0, 0, 1, 2}}).find("table 1 of placement of experts: rank 0 holds"),
              std::string::npos);
}

TEST(ExpertPlacement, ReplicasShareTheirLoad) {
    const ExpertPlacement placement{3, 3, 2, {0, 1, 2, 0, 0, -1}};
    EXPECT_EQ(slots_of_expert(placement, 0), (std::vector<std::uint64_t>{0, 3, 4}));
    EXPECT_EQ(slots_of_expert(placement, 2), (std::vector<std::uint64_t>{2}));
    EXPECT_NE(refusal([&] { slots_of_expert(placement, 3); }), "");
    EXPECT_EQ(replica_counts(placement), (std::vector<std::uint32_t>{3, 1, 1}));
    const std::vector<double> loads = {9, 4, 2};
    EXPECT_EQ(rank_loads(placement, loads), (std::vector<double>{7, 5, 3}));
    EXPECT_DOUBLE_EQ(max_over_mean(rank_loads(placement, loads)), 7.0 / 5.0);
    EXPECT_EQ(max_over_mean(std::vector<double>{0, 0}), 1.0);
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const std::vector<double>& wrong :
         {std::vector<double>{9, 4}, {9, -4, 2}, {9, nan, 2}, {9, 4, 1 / 0.0}})
        EXPECT_NE(refusal([&] { rank_loads(placement, wrong); }), "");
    EXPECT_NE(refusal([] { max_over_mean({}); }), "");
}

/// A table of random experts that has each of them.
ExpertPlacement random_placement(std::mt19937& random, std::uint64_t experts, std::uint64_t ranks,
                                 std::uint64_t slots) {
    ExpertPlacement placement{experts, ranks, slots, Table(ranks * slots)};
    for (std::uint64_t slot = 0; slot < placement.num_slots(); ++slot)
        placement.expert_of_slot[slot] =
            slot < experts ? static_cast<std::int32_t>(slot)
                           : static_cast<std::int32_t>(random() % (experts + 1)) - 1;
    std::ranges::shuffle(placement.expert_of_slot, random);
    return placement;
}

/// Slots of a rank that would have to be filled.
int filled(std::span<const std::int32_t> old, std::span<const std::int32_t> next) {
    int count = 0;
    for (std::size_t i = 0; i < old.size(); ++i)
        count += next[i] != kFreeSlot && next[i] != old[i];
    return count;
}

// Against all permutations of every rank.
TEST(Replacement, KeepsAsManySlotsAsAnyPermutation) {
    std::mt19937 random(7);
    int saved = 0;
    for (int round = 0; round < 300; ++round) {
        const std::uint64_t experts = 3 + random() % 6, ranks = 3, slots = 4;
        const ExpertPlacement old = random_placement(random, experts, ranks, slots);
        const ExpertPlacement wanted = random_placement(random, experts, ranks, slots);
        const ExpertPlacement kept = keep_slots(old, wanted);
        for (std::uint64_t rank = 0; rank < ranks; ++rank) {
            Table now(kept.of_rank(rank).begin(), kept.of_rank(rank).end());
            Table want(wanted.of_rank(rank).begin(), wanted.of_rank(rank).end());
            EXPECT_TRUE(std::ranges::is_permutation(now, want));
            const int moved = filled(old.of_rank(rank), now);
            saved += filled(old.of_rank(rank), want) - moved;
            std::ranges::sort(want);
            int fewest = static_cast<int>(slots);
            do {
                fewest = std::min(fewest, filled(old.of_rank(rank), want));
            } while (std::ranges::next_permutation(want).found);
            EXPECT_EQ(moved, fewest);
        }
        EXPECT_EQ(keep_slots(old, kept), kept);
        EXPECT_EQ(keep_slots(wanted, wanted), wanted);
    }
    EXPECT_GT(saved, 0);
}

TEST(Replacement, MovesMakeTheNewTable) {
    std::mt19937 random(11);
    for (int round = 0; round < 300; ++round) {
        const std::uint64_t experts = 2 + random() % 8;
        const ExpertPlacement old = random_placement(random, experts, 4, 3);
        const ExpertPlacement next = keep_slots(old, random_placement(random, experts, 4, 3));
        ExpertPlacement made = old;
        std::uint64_t after = 0;
        for (const ExpertMove& move : expert_moves(old, next)) {
            EXPECT_TRUE(move.slot >= after) << "by ascending slot";
            after = move.slot + 1;
            EXPECT_EQ(move.rank, move.slot / 3);
            EXPECT_EQ(move.from_rank, move.from_slot / 3);
            EXPECT_EQ(old.expert_of_slot[move.from_slot], move.expert) << "read from the old one";
            EXPECT_NE(old.expert_of_slot[move.slot], move.expert) << "is there already";
            made.expert_of_slot[move.slot] = move.expert;
        }
        for (std::uint64_t slot = 0; slot < next.num_slots(); ++slot) {
            if (next.expert_of_slot[slot] != kFreeSlot) {
                EXPECT_EQ(made.expert_of_slot[slot], next.expert_of_slot[slot]);
            }
        }
    }
}

TEST(Replacement, MovesComeFromTheOwnRankAndElseFromWhoSentLeast) {
    const ExpertPlacement old{3, 3, 3, {0, 1, -1, 0, 1, -1, 2, -1, -1}};
    const ExpertPlacement next{3, 3, 3, {0, 1, 0, 0, 2, -1, 2, 0, 1}};
    const std::vector<ExpertMove> expected = {
        {0, 2, 0, 0, 0}, // a second replica of its own
        {1, 4, 2, 2, 6}, // the only one that has it
        {2, 7, 0, 0, 0}, // ranks 0 and 1 have it and sent nothing
        {2, 8, 1, 1, 4}, // now rank 0 has sent one
    };
    EXPECT_EQ(expert_moves(old, next), expected);
    EXPECT_EQ(expert_moves(old, old), std::vector<ExpertMove>{});
    EXPECT_EQ(expert_moves({1, 2, 2, {0, -1, 0, -1}}, {1, 2, 2, {0, -1, 0, 0}}),
              (std::vector<ExpertMove>{{1, 3, 0, 1, 2}}))
        << "nothing is sent to a rank that has it";
}

TEST(Replacement, KeepsTheSizes) {
    const ExpertPlacement old = plain_placement(4, 2, 3), other = plain_placement(4, 3, 2);
    EXPECT_NE(refusal([&] { keep_slots(old, other); }).find("4 experts on 3 ranks of 2 slots"),
              std::string::npos);
    EXPECT_NE(refusal([&] { expert_moves(old, plain_placement(5, 2, 3)); }), "");
    ExpertPlacement broken = old;
    broken.expert_of_slot[0] = kFreeSlot;
    EXPECT_NE(refusal([&] { expert_moves(broken, old); }).find("expert 0 has no slot"),
              std::string::npos);
}

} // namespace
} // namespace bellows
