// SPDX-License-Identifier: MIT
#include <bellows/train/loss_watch.hpp>

#include <gtest/gtest.h>

#include <limits>

namespace bellows {
namespace {

TEST(LossWatch, KnowsAnExplosionFromALossThatMerelyRises) {
    LossWatch watch(256); // half of ln(256) is 2.77
    EXPECT_FALSE(watch.exploded(80)) << "nothing to compare with yet";
    watch.take(5.8);
    EXPECT_FALSE(watch.exploded(8.5));
    EXPECT_TRUE(watch.exploded(2042));
    EXPECT_TRUE(watch.exploded(std::numeric_limits<double>::quiet_NaN()));
    watch.take(2042); // is no part of the mean
    EXPECT_EQ(watch.best(), 5.8);
    for (int step = 0; step < 100; ++step)
        watch.take(1.5 + (step % 2 == 0 ? 0.5 : -0.5));
    EXPECT_NEAR(*watch.best(), 1.5, 0.1) << "a mean, not the lowest loss";
    EXPECT_FALSE(watch.exploded(4.0));
    EXPECT_TRUE(watch.exploded(4.5));
}

} // namespace
} // namespace bellows
