// SPDX-License-Identifier: MIT
// When experts are placed anew, by which loads, and what a resumed run has of it.
#include "train/expert_balancer.hpp"

#include "support/temporary_folder.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace bellows {
namespace {

/// Two layers behind a dense one, four experts on two ranks with three slots each.
ExpertBalancer::Desc some() {
    return {.dense_layers = 1,
            .layers = 3,
            .experts = 4,
            .ranks = 2,
            .slots_of_rank = 3,
            .replicas = 6,
            .every = 2};
}

std::vector<LayerLoads> loads(std::vector<std::uint64_t> first, std::vector<std::uint64_t> second) {
    return {{1, std::move(first)}, {2, std::move(second)}};
}

TEST(ExpertBalancer, PlacesByTheLoadsSinceTheLastTime) {
    ExpertBalancer balancer(some());
    EXPECT_EQ(balancer.placement(1), plain_placement(4, 2, 3));
    EXPECT_TRUE(balancer.after_step(1, loads({8, 0, 0, 0}, {1, 1, 1, 1})).empty());
    EXPECT_EQ(balancer.rank_loads({1, {6, 2, 1, 1}}), (std::vector<double>{8, 2}));
    const auto changed = balancer.after_step(2, loads({4, 8, 4, 4}, {1, 1, 1, 1}));
    ASSERT_EQ(changed.count(1), 1u);
    EXPECT_EQ(changed.at(1), balancer.placement(1));
    EXPECT_EQ(replica_counts(balancer.placement(1)), (std::vector<std::uint32_t>{2, 2, 1, 1}));
    // 12, 8, 4, 4 over both steps: half of the first two and one of the others on each.
    EXPECT_EQ(balancer.rank_loads({1, {12, 8, 4, 4}}), (std::vector<double>{14, 14}));
    EXPECT_FALSE(balancer.moved().empty());
    for (const MovedExpert& move : balancer.moved())
        EXPECT_NE(move.from, move.to);
    // The loads of before count no more.
    EXPECT_TRUE(balancer.after_step(3, loads({0, 0, 9, 0}, {1, 1, 1, 1})).empty());
    EXPECT_TRUE(balancer.moved().empty());
    balancer.after_step(4, loads({0, 0, 9, 0}, {1, 1, 1, 1}));
    EXPECT_EQ(replica_counts(balancer.placement(1))[2], 2u);
}

TEST(ExpertBalancer, StaysWhereItIsWithoutSlotsOrATime) {
    for (const bool slots : {false, true}) {
        ExpertBalancer::Desc desc = some();
        (slots ? desc.every : desc.slots_of_rank) = 0;
        ExpertBalancer balancer(desc);
        for (std::uint64_t step = 1; step < 6; ++step)
            EXPECT_TRUE(balancer.after_step(step, loads({9, 0, 0, 0}, {9, 0, 0, 0})).empty());
        EXPECT_EQ(balancer.places().placements.empty(), !slots);
    }
}

TEST(ExpertBalancer, GoesOnAsItWas) {
    ExpertBalancer first(some()), second(some());
    first.after_step(1, loads({1, 5, 2, 2}, {3, 1, 1, 1}));
    first.after_step(2, loads({1, 5, 2, 2}, {3, 1, 1, 1}));
    first.after_step(3, loads({7, 1, 1, 1}, {0, 0, 0, 8}));
    second.resume(first.places());
    EXPECT_EQ(second.places(), first.places());
    EXPECT_EQ(first.after_step(4, loads({1, 1, 1, 1}, {1, 1, 1, 1})),
              second.after_step(4, loads({1, 1, 1, 1}, {1, 1, 1, 1})));
    // On four ranks the experts are placed by what was seen.
    ExpertBalancer::Desc desc = some();
    desc.ranks = 4;
    desc.slots_of_rank = 2;
    desc.replicas = 8;
    ExpertBalancer other(desc);
    first.after_step(5, loads({90, 1, 1, 1}, {1, 1, 1, 90}));
    other.resume(first.places());
    EXPECT_EQ(replica_counts(other.placement(1))[0], 4u);
    EXPECT_EQ(replica_counts(other.placement(2))[3], 4u);
    // Also just behind a placement, when there are no loads since then.
    ExpertBalancer just(some()), after(desc);
    just.after_step(1, loads({1, 1, 1, 90}, {90, 1, 1, 1}));
    after.resume(just.places());
    EXPECT_EQ(replica_counts(after.placement(1))[3], 4u);
    just.after_step(2, loads({1, 1, 1, 90}, {90, 1, 1, 1}));
    EXPECT_EQ(just.places().loads.at(1), (std::vector<double>{0, 0, 0, 0}));
    ExpertBalancer behind(desc), nothing(desc);
    behind.resume(just.places());
    EXPECT_EQ(replica_counts(behind.placement(1))[3], 4u);
    EXPECT_EQ(replica_counts(behind.placement(2))[0], 4u);
    EXPECT_EQ(behind.places().placed_by, just.places().placed_by);
    nothing.resume(ExpertBalancer(some()).places()); // nobody has seen a load
    EXPECT_EQ(nothing.placement(1), plain_placement(4, 4, 2));
    ExpertPlaces wrong = first.places();
    wrong.loads.at(2).push_back(0);
    EXPECT_BELLOWS_ERROR(other.resume(wrong), InvalidArgument, "layer 2");
    wrong = first.places();
    wrong.placed_by.at(1).pop_back();
    EXPECT_BELLOWS_ERROR(other.resume(wrong), InvalidArgument, "layer 1");
    wrong = first.places();
    wrong.placements[3] = wrong.placements.at(2);
    wrong.loads[3] = wrong.loads.at(2);
    EXPECT_BELLOWS_ERROR(other.resume(wrong), InvalidArgument, "layer 3");
}

} // namespace
} // namespace bellows
