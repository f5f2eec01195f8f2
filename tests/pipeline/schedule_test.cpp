// SPDX-License-Identifier: MIT
#include <bellows/engine/error.hpp>
#include <bellows/pipeline/schedule.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>

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

/// The reverse of to_text(): stages end with ';', "X7" is an op of no known kind.
Schedule parse(std::uint64_t micro_batches, const std::string& text) {
    Schedule schedule{0, micro_batches, {}};
    std::istringstream stages(text);
    for (std::string stage; std::getline(stages, stage, ';'); ++schedule.num_stages) {
        schedule.stages.emplace_back();
        std::istringstream ops(stage);
        for (std::string op; ops >> op;)
            schedule.stages.back().push_back(
                {static_cast<OpKind>(std::string("FBW...X").find(op[0])),
                 std::stoull(op.substr(1))});
    }
    return schedule;
}

void expect_refused(const Schedule& schedule, const std::string& part) {
    try {
        verify(schedule);
        ADD_FAILURE() << "accepted, expected: " << part;
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
    }
}

TEST(Schedule, TheVerifierTakesWhatIsNotOurs) {
    // Forwards and gradients in another order than ours, on both stages alike.
    EXPECT_NO_THROW(verify(parse(2, "F1 F0 B1 B0 W0 W1;F1 F0 B1 B0 W0 W1")));
    EXPECT_NO_THROW(verify(parse(3, "F0 B0 F1 B1 W0 W1 F2 B2 W2")));
}

TEST(Schedule, TheVerifierRefusesSizesAndRangesBeforeItUsesThem) {
    expect_refused({0, 0, {}}, "at least one stage and one micro-batch");
    expect_refused({1, 0, {{}}}, "at least one stage and one micro-batch");
    expect_refused({3, 1, one_f_one_b(2, 1).stages}, "ops for 2 stages, not for 3");
    expect_refused({1, 1, one_f_one_b(2, 1).stages}, "ops for 2 stages, not for 1");
    const std::uint64_t many = std::uint64_t{1} << 63; // three times as many wrap around to as many
    expect_refused({1, many, {{}}}, "stage 0 has 0 ops");
    expect_refused(parse(2, "F0 B0 W0 F1 B1"), "stage 0 has 5 ops, not three for each of 2");
    expect_refused(parse(2, "F0 B0 W0 F2 B1 W1"), "stage 0, F2: there are micro-batches 0 to 1");
    expect_refused(parse(1, "F0 B18446744073709551615 W0"), "micro-batches 0 to 0");
    expect_refused(parse(1, "F0 B0 X0"), "stage 0, ?0: no kind of op has the number 6");
    EXPECT_THROW(one_f_one_b(2, 2).peak_in_flight(2), Error);
    EXPECT_EQ(parse(1, "W0 F0 B0").peak_in_flight(0), 1u);
    EXPECT_THROW(one_f_one_b(0, 1), Error);
    EXPECT_THROW(one_f_one_b(1, 0), Error);
}

TEST(Schedule, TheVerifierFindsBrokenOrders) {
    Schedule lost = one_f_one_b(2, 2);
    lost.stages[0].pop_back();
    expect_refused(lost, "stage 0 has 5 ops");
    expect_refused(parse(2, "F0 F0 B0 W0 B1 W1"), "stage 0, F0: runs twice");
    expect_refused(parse(1, "F0 B0 W0;B0 F0 W0"), "waits for an op that never runs before it");
    expect_refused(parse(1, "F0 W0 B0"), "stage 0, W0: waits for an op");
    // Each stage waits for the other.
    expect_refused(parse(2, "F0 B0 W0 F1 B1 W1;F0 F1 B0 W0 B1 W1"), "waits for an op");
    expect_refused(parse(2, "F0 F1 B1 W1 B0 W0"), "W1: weight gradients must be summed");
}

TEST(Schedule, TheVerifierFindsMessagesInTheWrongOrder) {
    // Every op finds what it needs; but the edges are FIFOs.
    expect_refused(parse(2, "F0 F1 B0 W0 B1 W1;F1 F0 B0 W0 B1 W1"),
                   "stage 1, F1: takes message 0 of stage 0, which is that of F0");
    expect_refused(parse(2, "F0 F1 B0 W0 B1 W1;F0 F1 B1 B0 W0 W1"),
                   "stage 0, B0: takes message 0 of stage 1, which is that of B1");
}

TEST(Schedule, TheVerifierFindsASlotThatIsTakenTwice) {
    // Two micro-batches in flight at most, but 0 and 2 meet in slot 0.
    const Schedule schedule = parse(3, "F0 F2 B0 W0 F1 B1 W1 B2 W2");
    EXPECT_EQ(schedule.peak_in_flight(0), 2u);
    expect_refused(schedule, "stage 0, F2: needs slot 0 of 2, which still holds micro-batch 0");
}

} // namespace
} // namespace bellows
