// SPDX-License-Identifier: MIT
// Figures of how evenly experts were chosen: known answers.
#include <bellows/shape/expert_placement.hpp>
#include <bellows/train/expert_balance.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

namespace bellows {
namespace {

/// On so many ranks that share the experts, each with a block.
ExpertBalance balance_of(LayerLoads layer, std::uint64_t ep, bool keep_loads) {
    const std::vector<double> loads(layer.loads.begin(), layer.loads.end());
    if (ep > 1)
        layer.rank_loads = rank_loads(plain_placement(loads.size(), ep), loads);
    return expert_balance(layer, keep_loads);
}

TEST(ExpertBalance, EvenLoadsAreOne) {
    const ExpertBalance balance = balance_of({3, {7, 7, 7, 7}}, 2, true);
    EXPECT_EQ(balance.layer, 3u);
    EXPECT_EQ(balance.max_over_mean, 1);
    EXPECT_EQ(balance.ranks_max_over_mean, 1);
    EXPECT_NEAR(balance.entropy, 1, 1e-12);
    EXPECT_EQ(balance.loads, (std::vector<std::uint64_t>{7, 7, 7, 7}));
}

TEST(ExpertBalance, OneExpertForAllIsTheWorst) {
    const ExpertBalance balance = balance_of({0, {0, 0, 12, 0}}, 2, false);
    EXPECT_EQ(balance.max_over_mean, 4);
    EXPECT_EQ(balance.ranks_max_over_mean, 2);
    EXPECT_EQ(balance.entropy, 0);
    EXPECT_TRUE(balance.loads.empty());
}

TEST(ExpertBalance, UnevenExpertsMayStandOnEvenRanks) {
    // Shares 1/8, 3/8, 3/8, 1/8: the mean is 2, each block of two has 4.
    const ExpertBalance balance = balance_of({1, {1, 3, 3, 1}}, 2, false);
    EXPECT_EQ(balance.max_over_mean, 1.5);
    EXPECT_EQ(balance.ranks_max_over_mean, 1);
    const double bits = 2 * (1.0 / 8 * 3 + 3.0 / 8 * std::log2(8.0 / 3));
    EXPECT_NEAR(balance.entropy, bits / 2, 1e-12) << "of at most two bits";
}

// Five experts on two ranks: three and two of them.
TEST(ExpertBalance, RanksMayHaveUnequalBlocks) {
    EXPECT_EQ(balance_of({0, {4, 4, 4, 4, 4}}, 2, false).ranks_max_over_mean, 1.2);
    EXPECT_EQ(balance_of({0, {0, 0, 0, 5, 5}}, 2, false).ranks_max_over_mean, 2);
    // Two experts on three ranks: one has none.
    EXPECT_EQ(balance_of({0, {3, 3}}, 3, false).ranks_max_over_mean, 1.5);
}

TEST(ExpertBalance, WhereNothingWasChosenAllIsEven) {
    const ExpertBalance balance = balance_of({0, {0, 0}}, 2, true);
    EXPECT_EQ(balance.max_over_mean, 1);
    EXPECT_EQ(balance.ranks_max_over_mean, 1);
    EXPECT_EQ(balance.entropy, 1);
    EXPECT_EQ(balance_of({0, {9}}, 1, true).entropy, 1) << "one expert";
    EXPECT_FALSE(balance_of({0, {9, 1}}, 1, true).ranks_max_over_mean.has_value())
        << "a rank with all experts has none to be compared with";
}

TEST(ExpertBalance, SaysWhatACapacityDropped) {
    LayerLoads layer{1, {6, 2, 0, 0}};
    EXPECT_FALSE(expert_balance(layer, false).dropped.has_value());
    layer.kept = 6;
    EXPECT_EQ(expert_balance(layer, false).dropped, 0.25);
    layer = {1, {0, 0}, {}, 0};
    EXPECT_EQ(expert_balance(layer, false).dropped, 0) << "nothing was chosen";
}

TEST(ExpertBalance, ManyLoadsAreKeptNowAndThen) {
    std::vector<std::uint64_t> kept;
    for (std::uint64_t step = 1; step <= 30; ++step) {
        EXPECT_TRUE(keeps_loads(step, 1024));
        if (keeps_loads(step, 1025))
            kept.push_back(step);
    }
    EXPECT_EQ(kept, (std::vector<std::uint64_t>{1, 10, 20, 30}));
}

} // namespace
} // namespace bellows
