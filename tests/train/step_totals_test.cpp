// SPDX-License-Identifier: MIT
// What ranks sum up at a step's end: losses, each micro-batch once, bytes and waits of one step.
#include "support/mpi_test.hpp"
#include "train/step_totals.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

namespace bellows {
namespace {

using testing::world;

class StepTotalsTest : public ::testing::Test {
protected:
    StepTotalsTest() {
        totals.watch([this] { return traffic; });
    }

    std::uint64_t rank = static_cast<std::uint64_t>(world().rank());
    std::uint64_t ranks = static_cast<std::uint64_t>(world().size());
    HostCollectives everyone{world(), Group::all(world().size())};
    StepTotals totals{everyone};
    Traffic traffic; ///< of the one connection of this rank
};

TEST_F(StepTotalsTest, CountEachMicroBatchOnce) {
    // Copies note the same one; the last is noted by one rank.
    totals.note_loss(0, 0.5);
    totals.note_loss(1 + rank, static_cast<double>(rank));
    EXPECT_EQ(totals.sum_losses().sum, 0.5 + static_cast<double>(ranks * (ranks - 1)) / 2);
    totals.note_loss(0, 1.5); // the next step's
    EXPECT_EQ(totals.sum_losses().sum, 1.5 + static_cast<double>(ranks * (ranks - 1)) / 2);
}

TEST_F(StepTotalsTest, TellAllWhatAnyAsks) {
    totals.note_loss(rank, 0.25);
    const auto asked = [&](bool save, bool stop) {
        const StepTotals::Losses losses = totals.sum_losses({.save = save, .stop = stop});
        EXPECT_EQ(losses.sum, 0.25 * static_cast<double>(ranks));
        return losses.asked;
    };
    const StepAsks last = asked(false, rank + 1 == ranks);
    EXPECT_TRUE(last.stop && !last.save);
    const StepAsks first = asked(rank == 0, false);
    EXPECT_TRUE(first.save && !first.stop);
    const StepAsks none = asked(false, false);
    EXPECT_FALSE(none.save || none.stop);
}

// Each rank tells of other layers, the last one of none.
TEST_F(StepTotalsTest, TellAllTheLoadsOfAllLayers) {
    totals.note_loss(rank, 0.25);
    std::vector<LayerLoads> all, mine;
    for (std::uint64_t layer = 0; layer < 6; ++layer) {
        LayerLoads loads{layer, {layer, 0, (std::uint64_t{1} << 40) + layer}};
        const std::uint64_t teller = ranks == 1 ? 0 : layer % (ranks - 1);
        if (teller == rank)
            mine.insert(mine.begin(), loads);
        all.push_back(std::move(loads));
    }
    const StepTotals::Losses losses = totals.sum_losses({.save = rank == 0}, mine);
    EXPECT_EQ(losses.expert_loads, all);
    EXPECT_EQ(losses.sum, 0.25 * static_cast<double>(ranks));
    EXPECT_TRUE(losses.asked.save && !losses.asked.stop);
    EXPECT_TRUE(totals.sum_losses().expert_loads.empty()) << "they are one step's";
}

TEST_F(StepTotalsTest, CountBytesOfOneStep) {
    traffic.bytes_sent = 100 * (rank + 1);
    const StepTotals::Sums first = totals.sum_with_bytes(1);
    EXPECT_EQ(first.value, static_cast<double>(ranks));
    EXPECT_EQ(first.bytes, 100 * ranks * (ranks + 1) / 2);
    totals.leave_out([&] { traffic.bytes_sent += 1000; });
    traffic.bytes_sent += 7;
    EXPECT_EQ(totals.sum_with_bytes(0).bytes, 7 * ranks);
    EXPECT_EQ(totals.sum_with_bytes(0).bytes, 0u);
}

TEST_F(StepTotalsTest, CountWhatRanksWaitedSinceTheLastStep) {
    traffic.seconds_waited = 3.0 * static_cast<double>(rank);
    EXPECT_NEAR(totals.sum_losses().seconds_waited, 1.5 * static_cast<double>(ranks - 1), 1e-9);
    totals.leave_out([&] { traffic.seconds_waited += 5; });
    traffic.seconds_waited += 2;
    totals.in_collective([] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    const double waited = totals.sum_losses().seconds_waited;
    // A rank alone waits for nobody; the others wait in the collective of sum_losses(), too.
    if (ranks == 1)
        EXPECT_EQ(waited, 2);
    else
        EXPECT_GE(waited, 2.02);
}

} // namespace
} // namespace bellows
