// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <gtest/gtest.h>

#include <algorithm>

namespace bellows {
namespace {

TEST(Schedule, OneForwardOneBackwardOfTwoStages) {
    EXPECT_EQ(to_text(one_f_one_b(2, 3)), "F0 F1 B0 W0 F2 B1 W1 B2 W2\n"
                                          "F0 B0 W0 F1 B1 W1 F2 B2 W2\n");
}

TEST(Schedule, IsVerifiedForAllSizes) {
    for (std::uint64_t stages = 1; stages <= 16; ++stages)
        for (std::uint64_t micro_batches = 1; micro_batches <= 40; ++micro_batches) {
            const Schedule schedule = one_f_one_b(stages, micro_batches);
            ASSERT_NO_THROW(verify(schedule)) << stages << " stages, " << micro_batches;
            for (std::uint64_t stage = 0; stage < stages; ++stage)
                ASSERT_EQ(schedule.peak_in_flight(stage), std::min(micro_batches, stages - stage));
        }
}

TEST(Schedule, TheVerifierFindsBrokenOnes) {
    Schedule lost = one_f_one_b(2, 2);
    lost.stages[0].pop_back();
    EXPECT_THROW(verify(lost), Error);

    Schedule swapped = one_f_one_b(2, 2);
    std::swap(swapped.stages[1][0], swapped.stages[1][1]); // B0 before F0
    EXPECT_THROW(verify(swapped), Error);

    Schedule crossed = one_f_one_b(1, 2); // sums in descending order
    crossed.stages[0] = {{OpKind::Forward, 0},       {OpKind::Forward, 1},
                         {OpKind::InputGradient, 1}, {OpKind::WeightGradient, 1},
                         {OpKind::InputGradient, 0}, {OpKind::WeightGradient, 0}};
    EXPECT_THROW(verify(crossed), Error);

    EXPECT_THROW(one_f_one_b(0, 1), Error);
}

} // namespace
} // namespace bellows
