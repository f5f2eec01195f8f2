// SPDX-License-Identifier: MIT
// The simulator against the published formulas where they hold, and against small cases by hand.
#include "pipeline/all_schedules.hpp"

#include <bellows/schedule/simulate.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>

namespace bellows {
namespace {

Timeline run(ScheduleKind kind, std::uint64_t ranks, std::uint64_t micro_batches,
             const StageCosts& costs = {}, bool decoupled = false) {
    const Schedule schedule = make_schedule({kind, ranks, micro_batches});
    return simulate(decoupled ? decouple_pairs(schedule, {.stages = {costs}}) : schedule,
                    {.stages = {costs}});
}

double most(const std::vector<double>& values) {
    return *std::max_element(values.begin(), values.end());
}

std::vector<double> starts(const Timeline& timeline, std::uint64_t rank) {
    std::vector<double> all;
    for (const OpTime& op : timeline.ops[rank])
        all.push_back(op.start);
    return all;
}

TEST(Simulation, KnownAnswersOfDualPipe) {
    const Timeline small = run(ScheduleKind::DualPipe, 4, 8);
    EXPECT_EQ(small.step_time, 26);
    EXPECT_EQ(small.bubble, std::vector<double>(4, 2.0));
    // A pair's halves have the same times.
    EXPECT_EQ(starts(small, 0), (std::vector<double>{0, 1, 2, 3, 4, 5, 6, 7, 7, 11, 11, 14, 17, 17,
                                                     20, 22, 23, 24, 25}));
    EXPECT_EQ(starts(small, 1), (std::vector<double>{1, 2, 3, 4, 5, 6, 8, 8, 11, 11, 14, 14, 17, 19,
                                                     22, 23, 24, 25}));
    EXPECT_EQ(run(ScheduleKind::DualPipe, 8, 16).step_time, 54);
    const Timeline large = run(ScheduleKind::DualPipe, 8, 20);
    EXPECT_EQ(large.step_time, 66);
    EXPECT_EQ(large.bubble, std::vector<double>(8, 6.0));
    EXPECT_EQ(large.messages, 2u * 20 * 7);
    // Where forwards and input gradients differ, the formula does not hold.
    EXPECT_EQ(most(run(ScheduleKind::DualPipe, 8, 24, {8, 7, 7, 21}).bubble), 45);
}

TEST(Simulation, DecoupledHalvesOfPairsSaveForwards) {
    EXPECT_EQ(run(ScheduleKind::DualPipe, 4, 10, {}, true).step_time, 31);
    EXPECT_EQ(run(ScheduleKind::DualPipe, 8, 20, {}, true).step_time, 63);
    EXPECT_EQ(run(ScheduleKind::DualPipe, 16, 64, {}, true).step_time, 199);
    for (std::uint64_t ranks = 2; ranks <= 16; ranks += 2)
        for (std::uint64_t micro_batches = 2 * ranks; micro_batches <= 64; micro_batches += 2)
            EXPECT_EQ(run(ScheduleKind::DualPipe, ranks, micro_batches).step_time -
                          run(ScheduleKind::DualPipe, ranks, micro_batches, {}, true).step_time,
                      static_cast<double>(ranks) / 2 - 1);
    const Schedule single = decouple_pairs(make_schedule({ScheduleKind::DualPipe, 8, 20}));
    EXPECT_EQ(to_text(single).find('&'), std::string::npos);
    EXPECT_NO_THROW(verify(single));
}

/// Bubble of the rank that idles most, in the step or (zero bubble across steps) between its own
/// first and last op, for equal costs of a whole rank's share: f, i, w.
double published_bubble(const ScheduleDesc& desc, const StageCosts& c) {
    const double p = static_cast<double>(desc.ranks), b = c.backward();
    switch (desc.kind) {
    case ScheduleKind::GPipe:
    case ScheduleKind::OneFOneB:
        return (p - 1) * (c.forward + b);
    case ScheduleKind::Interleaved: // costs are a chunk's
        return (p - 1) * (c.forward + b);
    case ScheduleKind::ZbH1:
        return (p - 1) * (c.forward + b - 2 * c.weight_gradient);
    case ScheduleKind::ZbH2:
    case ScheduleKind::ZbV:
        return 0;
    case ScheduleKind::DualPipe:
        return (p / 2 - 1) * (c.pair.value_or(c.forward + b) + b - 3 * c.weight_gradient);
    case ScheduleKind::DualPipeV:
        return (p - 1) * (c.pair.value_or(c.forward + b) + b - 3 * c.weight_gradient);
    }
    return -1;
}

TEST(Simulation, BubblesAreThePublishedOnes) {
    for (const ScheduleDesc& desc : all_schedules()) {
        const bool across = desc.kind == ScheduleKind::ZbH2 || desc.kind == ScheduleKind::ZbV;
        // Too few micro-batches leave the pipeline unfilled.
        if ((across && desc.micro_batches + 1 < 2 * desc.ranks) ||
            (desc.kind == ScheduleKind::ZbH1 && desc.micro_batches < desc.ranks))
            continue;
        const Timeline timeline = simulate(make_schedule(desc));
        ASSERT_EQ(most(across ? timeline.inner_bubble : timeline.bubble),
                  published_bubble(desc, {}))
            << name_of(desc);
    }
}

TEST(Simulation, FormulasHoldForOtherCosts) {
    std::mt19937 random(1);
    const auto pick = [&](int low, int high) {
        return static_cast<double>(std::uniform_int_distribution<int>(low, high)(random));
    };
    for (int i = 0; i < 2000; ++i) {
        ScheduleDesc desc{i % 2 == 0 ? ScheduleKind::DualPipe : ScheduleKind::DualPipeV};
        desc.ranks = static_cast<std::uint64_t>(pick(1, 6)) * (i % 2 == 0 ? 2 : 1);
        desc.micro_batches = 2 * desc.ranks + 2 * static_cast<std::uint64_t>(pick(0, 10));
        // The formula's domain: forward and input gradient alike, pairs that gain or lose nothing
        // more than overlap can.
        StageCosts costs;
        costs.forward = costs.input_gradient = pick(1, 20);
        costs.weight_gradient = pick(0, static_cast<int>(costs.forward));
        costs.pair = pick(static_cast<int>(std::max(costs.forward, costs.backward())),
                          static_cast<int>(costs.forward + costs.backward()));
        const Timeline timeline = simulate(make_schedule(desc), {.stages = {costs}});
        const double all =
            static_cast<double>(desc.micro_batches) * (desc.kind == ScheduleKind::DualPipe ? 1 : 2);
        const double half =
            static_cast<double>(desc.ranks) / (desc.kind == ScheduleKind::DualPipe ? 2 : 1);
        ASSERT_EQ(timeline.step_time, (2 * half + 1) * (costs.forward + costs.backward()) +
                                          (all - 2 * half - 1) * *costs.pair +
                                          published_bubble(desc, costs))
            << name_of(desc) << ": f, i = " << costs.forward << ", w = " << costs.weight_gradient
            << ", fb = " << *costs.pair;
    }
    // 1F1B and ZB-H1 with unequal costs: f >= i >= w for the latter.
    EXPECT_EQ(most(run(ScheduleKind::OneFOneB, 5, 12, {3, 4, 2, {}}).bubble), 4 * 9);
    EXPECT_EQ(most(run(ScheduleKind::ZbH1, 5, 12, {4, 4, 3, {}}).bubble), 4 * 5);
}

TEST(Simulation, BubblesDoNotGrowWithMicroBatches) {
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind) {
        const auto of = static_cast<ScheduleKind>(kind);
        EXPECT_EQ(run(of, 4, 16).bubble, run(of, 4, 64).bubble) << to_string(of);
    }
}

TEST(Simulation, StagesCostWhatTheyCost) {
    // F of stage 1 takes 3: rank 1 is never idle after its first op, rank 0 waits for it.
    const Schedule schedule = make_schedule({.ranks = 2, .micro_batches = 2});
    const Timeline timeline =
        simulate(schedule, {.stages = {StageCosts{1, 1, 1, {}}, StageCosts{3, 2, 1, {}}}});
    EXPECT_EQ(timeline.step_time, 1 + 2 * 6 + 2);
    EXPECT_EQ(timeline.busy, (std::vector<double>{6, 12}));
    EXPECT_EQ(timeline.bubble, (std::vector<double>{9, 3}));
    EXPECT_EQ(timeline.inner_bubble, (std::vector<double>{9, 0}));
    EXPECT_EQ(starts(timeline, 0), (std::vector<double>{0, 1, 7, 13}));
}

TEST(Simulation, MessagesTakeTimeAndShareTheirLink) {
    const Schedule schedule = make_schedule({ScheduleKind::GPipe, 2, 2});
    const Timeline late = simulate(schedule, {.p2p_latency = 10});
    EXPECT_EQ(starts(late, 1), (std::vector<double>{11, 12, 13, 15}));
    EXPECT_EQ(starts(late, 0), (std::vector<double>{0, 1, 25, 27}));
    EXPECT_EQ(late.messages, 4u);
    // The second message waits for the first one's end: there at 1 + 5 + 5.
    const Timeline slow = simulate(schedule, {.p2p_transfer = 5});
    EXPECT_EQ(starts(slow, 1), (std::vector<double>{6, 11, 12, 14}));
    // Within a rank there are none.
    EXPECT_EQ(simulate(make_schedule({ScheduleKind::ZbV, 1, 3}), {.p2p_latency = 10}).messages, 0u);
}

TEST(Simulation, GradientsMayLeaveBeforeTheWeightsAreDone) {
    const Schedule schedule = make_schedule({.ranks = 4, .micro_batches = 8});
    EXPECT_EQ(simulate(schedule).step_time, 33);
    // Each of the three hops back saves a weight gradient at the end.
    const Schedule split = split_backwards(schedule);
    EXPECT_EQ(simulate(split).step_time, 30);
    EXPECT_EQ(to_text(split).find('B'), std::string::npos);
    for (std::uint64_t rank = 0; rank < 4; ++rank)
        EXPECT_EQ(split.peak_in_flight(rank), schedule.peak_in_flight(rank));
    const std::string pairs =
        to_text(split_backwards(make_schedule({ScheduleKind::DualPipe, 2, 4})));
    EXPECT_NE(pairs.find("F1&B0"), std::string::npos) << pairs;
}

TEST(Simulation, WeightGradientsMayRunBesideOtherOps) {
    const Schedule schedule = make_schedule({ScheduleKind::ZbH1, 2, 4});
    ASSERT_EQ(to_text(schedule), "F0 F0 I0 W F0 I0 W F0 I0 W I0 W\n"
                                 "F0 I0 W F0 I0 W F0 I0 F0 I0 W W\n");
    ASSERT_EQ(schedule.peak_in_flight(1), 2u);
    SimulationOptions options;
    options.rows = {.weight_gradients = 0.5, .others = 0.25};
    const Timeline timeline = simulate(schedule, options);
    const auto expect = [&](std::uint64_t rank, std::size_t op, double start, double end) {
        EXPECT_DOUBLE_EQ(timeline.ops[rank][op].start, start) << rank << ", " << op;
        EXPECT_DOUBLE_EQ(timeline.ops[rank][op].end, end) << rank << ", " << op;
    };
    // The last stage's: W0 takes 2 beside F1, which has done half of its work by then.
    expect(1, 0, 1, 2);
    expect(1, 1, 2, 3);
    expect(1, 2, 3, 5);
    expect(1, 3, 3, 5.5);
    expect(1, 4, 5.5, 6.5);
    // F2 in W0's place, which has ended.
    expect(1, 5, 6.5, 8.5);
    expect(1, 6, 6.5, 9);
    // F3 in W1's place; W2 beside it.
    expect(1, 7, 9, 10);
    expect(1, 10, 10, 12);
    expect(1, 8, 10, 12.5);
    expect(1, 9, 12.5, 13.5);
    expect(1, 11, 13.5, 14.5);
    // Those of the first stage stay among its other ops.
    expect(0, 2, 3, 4);
    expect(0, 3, 4, 5);
    EXPECT_DOUBLE_EQ(timeline.step_time, 15.5);
    EXPECT_DOUBLE_EQ(timeline.bubble[1], 2);
}

TEST(Simulation, AForwardWaitsForTheWeightGradientWhosePlaceItTakes) {
    const Schedule schedule = split_backwards(make_schedule({.ranks = 2, .micro_batches = 3}));
    ASSERT_EQ(schedule.peak_in_flight(1), 1u);
    SimulationOptions options;
    options.rows = {.weight_gradients = 1, .others = 1};
    const Timeline timeline = simulate(schedule, options);
    EXPECT_EQ(timeline.step_time, simulate(schedule).step_time);
    EXPECT_EQ(starts(timeline, 1), (std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8, 9}));
    // ZB-H1's last stage has two: F1 and I1 run beside W0, and F2 waits for the rest of it.
    const Schedule late = make_schedule({ScheduleKind::ZbH1, 2, 4});
    options.stages = {{1, 1, 0, {}}, {1, 1, 4, {}}};
    options.rows = {.weight_gradients = 0.5, .others = 1};
    const Timeline waits = simulate(late, options);
    EXPECT_DOUBLE_EQ(waits.ops[1][4].end, 5); // W0 has 3 left
    EXPECT_DOUBLE_EQ(waits.ops[1][2].end, 8);
    EXPECT_DOUBLE_EQ(waits.ops[1][6].start, 8);
}

TEST(Simulation, ARowThatHoldsUpNobodyTakesNoLonger) {
    for (const ScheduleDesc& desc : all_schedules()) {
        if (desc.ranks > 4 || desc.micro_batches > 16)
            continue;
        const Schedule schedule = split_backwards(make_schedule(desc));
        SimulationOptions options{.stages = {{1.25, 1, 0.75, {}}}, .p2p_latency = 0.125};
        const double one_row = simulate(schedule, options).step_time;
        options.rows = {.weight_gradients = 1, .others = 1};
        const Timeline timeline = simulate(schedule, options);
        EXPECT_LE(timeline.step_time, one_row + 1e-9) << name_of(desc);
        for (std::uint64_t rank = 0; rank < desc.ranks; ++rank)
            for (std::size_t op = 0; op < schedule.ops[rank].size(); ++op)
                EXPECT_GE(timeline.ops[rank][op].end - timeline.ops[rank][op].start, 0.75 - 1e-9)
                    << name_of(desc) << ", " << op; // a weight gradient, none of which is left out
    }
}

TEST(Simulation, BadCostsAndSchedulesAreRefused) {
    const Schedule schedule = make_schedule({.ranks = 2, .micro_batches = 2});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT_THROW((void)simulate(schedule, {.stages = {{-1, 1, 1, {}}}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.stages = {{1, nan, 1, {}}}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.stages = {{1, 1, 1, -2}}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.stages = {}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.stages = std::vector<StageCosts>(3)}), Error);
    EXPECT_THROW((void)simulate(schedule, {.p2p_latency = -1}), Error);
    EXPECT_THROW((void)simulate(schedule, {.rows = RowShares{0, 1}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.rows = RowShares{1, 1.5}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.rows = RowShares{1, nan}}), Error);
    EXPECT_THROW((void)simulate(schedule, {.stages = {{1e308, 1e308, 1e308, {}}}}), Error);
    Schedule stuck = schedule;
    std::swap(stuck.ops[0][0], stuck.ops[0].back());
    EXPECT_THROW((void)simulate(stuck), Error);
}

} // namespace
} // namespace bellows
