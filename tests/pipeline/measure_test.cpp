// SPDX-License-Identifier: MIT
// What a trace tells of a schedule, and the costs that a simulation gets from it.
#include "all_schedules.hpp"

#include <bellows/pipeline/measure.hpp>

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

namespace bellows {
namespace {

TraceEvent work(const std::string& op, std::int64_t begin_ms, std::int64_t end_ms,
                const std::string& by = "") {
    return {"compute", "kernel", "MLP(F)", begin_ms * 1'000'000, end_ms * 1'000'000, op, by};
}

TraceEvent job(const std::string& op, std::int64_t begin_ms, std::int64_t end_ms) {
    return {"exchange", "DISPATCH(F)", "lane", begin_ms * 1'000'000, end_ms * 1'000'000, op};
}

void expect_time(const OpTime& time, double start_ms, double end_ms) {
    EXPECT_NEAR(time.start, 1e-3 * start_ms, 1e-12);
    EXPECT_NEAR(time.end, 1e-3 * end_ms, 1e-12);
}

TEST(Measure, OpsReachFromTheirFirstWorkToTheirLast) {
    // F0.m0, B0.m0 (as its halves), F0.m1, B0.m1
    const Schedule schedule = make_schedule({.ranks = 1, .micro_batches = 2});
    ASSERT_EQ(to_text(schedule), "F0 B0 F0 B0\n");
    const std::vector<TraceEvent> events = {
        work("F0.m0", 10, 12),     work("F0.m0", 15, 17),  work("I0.m0", 20, 21),
        work("W0.m0", 22, 26),     work("", 0, 1),         work("PP(F0.m1)", 2, 3),
        work("F0.m1", 30, 31),     job("F0.m1", 31, 34),   job("F0.m1", 33, 36),
        work("W0.m0", 34, 35),     job("PP(F0.m1)", 1, 9), work("F0.m1", 36, 37, "exchange"),
        work("F0.m7", 1000, 1001),
    };
    const RankTimes times = times_of_rank(schedule, 0, events);
    ASSERT_EQ(times.ops.size(), 4u);
    expect_time(times.ops[0], 10, 17);
    expect_time(times.ops[1], 20, 35);
    expect_time(times.ops[2], 30, 37);
    expect_time(times.ops[3], 37, 37); // it left no work: behind what is before it
    ASSERT_EQ(times.exchange.size(), 1u);
    expect_time(times.exchange[0], 31, 36);   // jobs that overlap count once
    EXPECT_NEAR(times.hidden, 1e-3, 1e-12);   // under W0.m0, not under the exchange's own work
    EXPECT_NEAR(times.stalled, 16e-3, 1e-12); // of 10 to 37 what its own work leaves
}

TEST(Measure, AnEmptyTraceIsNoStep) {
    const Schedule schedule = make_schedule({.ranks = 2, .micro_batches = 2});
    const RankTimes times = times_of_rank(schedule, 1, {});
    EXPECT_EQ(times.ops.size(), schedule.ops[1].size());
    EXPECT_TRUE(times.exchange.empty());
    EXPECT_EQ(times.stalled, 0);
    EXPECT_EQ(timeline_of({times.ops, times.ops}).step_time, 0);
}

TEST(Measure, CostsOfASimulatedStepAreThoseOfTheSimulation) {
    for (const ScheduleDesc& desc : all_schedules()) {
        if (desc.ranks > 4 || desc.micro_batches > 16)
            continue;
        SCOPED_TRACE(name_of(desc));
        const Schedule made = make_schedule(desc);
        SimulationOptions costs;
        costs.stages.clear();
        for (std::uint64_t stage = 0; stage < made.num_stages; ++stage)
            costs.stages.push_back({1.0 + 0.25 * static_cast<double>(stage % 3), 1.5, 0.75, {}});
        const Schedule schedule = split_backwards(decouple_pairs(made, costs));
        costs.p2p_latency = made.num_ranks() > 1 ? 0.125 : 0;
        const Timeline timeline = simulate(schedule, costs);
        const SimulationOptions found = costs_of(schedule, timeline);
        ASSERT_EQ(found.stages.size(), costs.stages.size());
        for (std::size_t stage = 0; stage < costs.stages.size(); ++stage) {
            const StageCosts &is = found.stages[stage], &was = costs.stages[stage];
            EXPECT_NEAR(is.forward, was.forward, 1e-9) << stage;
            EXPECT_NEAR(is.input_gradient, was.input_gradient, 1e-9) << stage;
            EXPECT_NEAR(is.weight_gradient, was.weight_gradient, 1e-9) << stage;
        }
        EXPECT_NEAR(found.p2p_latency, costs.p2p_latency, 1e-9);
        EXPECT_NEAR(simulate(schedule, found).step_time, timeline.step_time, 1e-6);
    }
}

TEST(Measure, SharesFollowFromOpsThatRanBesideOthersForDifferentTimes) {
    const Schedule schedule =
        make_schedule({.kind = ScheduleKind::ZbH1, .ranks = 4, .micro_batches = 16});
    SimulationOptions costs;
    costs.stages = {StageCosts{1.25, 1.5, 1, {}}};
    costs.p2p_latency = 0.125;
    costs.rows = {.weight_gradients = 0.875, .others = 0.375};
    const Timeline timeline = simulate(schedule, costs);
    const SimulationOptions found = costs_of(schedule, timeline, true);
    ASSERT_TRUE(found.rows);
    EXPECT_NEAR(found.rows->weight_gradients, 0.875, 1e-3);
    EXPECT_NEAR(found.rows->others, 0.375, 1e-3);
    for (const StageCosts& stage : found.stages) {
        EXPECT_NEAR(stage.forward, 1.25, 1e-3);
        EXPECT_NEAR(stage.input_gradient, 1.5, 1e-3);
        EXPECT_NEAR(stage.weight_gradient, 1, 1e-3);
    }
    EXPECT_NEAR(simulate(schedule, found).step_time, timeline.step_time, 1e-2);
    // What differs by chance evens out.
    std::mt19937 random(1);
    std::uniform_real_distribution<double> shorter(0.9, 1);
    Timeline uneven = timeline;
    for (auto& ops : uneven.ops)
        for (OpTime& time : ops)
            time.end = time.start + shorter(random) * (time.end - time.start);
    const SimulationOptions about = costs_of(schedule, uneven, true);
    ASSERT_TRUE(about.rows);
    EXPECT_NEAR(about.rows->weight_gradients, 0.875, 0.075);
    EXPECT_NEAR(about.rows->others, 0.375, 0.075);
    // As if they stood in one row, it would be another step.
    EXPECT_FALSE(costs_of(schedule, timeline).rows);
    EXPECT_LT(simulate(schedule, costs_of(schedule, timeline)).step_time,
              0.99 * timeline.step_time);
}

TEST(Measure, WhereNothingTellsTheSharesTheyAreHalves) {
    // 1F1B's last stage has one place, so its forwards wait for its weight gradients.
    const Schedule schedule = split_backwards(make_schedule({.ranks = 2, .micro_batches = 4}));
    SimulationOptions costs;
    costs.rows = {.weight_gradients = 0.875, .others = 0.375};
    const Timeline timeline = simulate(schedule, costs);
    const SimulationOptions found = costs_of(schedule, timeline, true);
    ASSERT_TRUE(found.rows);
    EXPECT_EQ(found.rows->weight_gradients, 0.5);
    EXPECT_EQ(found.rows->others, 0.5);
    EXPECT_NEAR(simulate(schedule, found).step_time, timeline.step_time, 1e-9);
    const Schedule pairs =
        make_schedule({.kind = ScheduleKind::DualPipe, .ranks = 2, .micro_batches = 4});
    EXPECT_FALSE(costs_of(pairs, simulate(pairs), true).rows); // theirs are part of them
}

TEST(Measure, OpsThatRanBesideEachOtherAreOneRow) {
    const Schedule schedule =
        make_schedule({.kind = ScheduleKind::ZbH1, .ranks = 4, .micro_batches = 16});
    SimulationOptions costs;
    costs.rows = {.weight_gradients = 0.875, .others = 0.375};
    Timeline timeline = simulate(schedule, costs);
    ASSERT_TRUE(costs_of(schedule, timeline, true).rows);
    for (std::uint64_t rank = 0; rank < 4; ++rank)
        for (std::size_t i = 0; i < schedule.ops[rank].size(); ++i)
            if (schedule.ops[rank][i].kind == OpKind::Forward) // as long again into what follows
                timeline.ops[rank][i].end +=
                    timeline.ops[rank][i].end - timeline.ops[rank][i].start;
    EXPECT_FALSE(costs_of(schedule, timeline, true).rows);
}

TEST(Measure, PairsCostWhatBothTakeTogether) {
    const Schedule schedule =
        make_schedule({.kind = ScheduleKind::DualPipe, .ranks = 4, .micro_batches = 12});
    SimulationOptions costs;
    costs.stages = {StageCosts{1, 1, 1, 2.25}};
    const Timeline timeline = simulate(schedule, costs);
    const SimulationOptions found = costs_of(schedule, timeline);
    for (const StageCosts& stage : found.stages) {
        ASSERT_TRUE(stage.pair);
        EXPECT_NEAR(*stage.pair, 2.25, 1e-9);
    }
    EXPECT_NEAR(simulate(schedule, found).step_time, timeline.step_time, 1e-6);
}

TEST(Measure, RanksWithTheSameStagesMayDiffer) {
    const Schedule schedule = split_backwards(decouple_pairs(
        make_schedule({.kind = ScheduleKind::DualPipe, .ranks = 2, .micro_batches = 12})));
    SimulationOptions costs;
    costs.slowness = {1, 1.5};
    const Timeline timeline = simulate(schedule, costs);
    EXPECT_NEAR(timeline.busy[1], 1.5 * timeline.busy[0], 1e-9);
    const SimulationOptions found = costs_of(schedule, timeline);
    ASSERT_EQ(found.slowness.size(), 2u);
    EXPECT_NEAR(found.slowness[1] / found.slowness[0], 1.5, 1e-9);
    EXPECT_NEAR(simulate(schedule, found).step_time, timeline.step_time, 1e-9);
    costs.slowness = {1};
    EXPECT_THROW(simulate(schedule, costs), Error);
    costs.slowness = {1, -1};
    EXPECT_THROW(simulate(schedule, costs), Error);
}

} // namespace
} // namespace bellows
