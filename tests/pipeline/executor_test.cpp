// SPDX-License-Identifier: MIT
// The executor with stages of numbers: what arrives tells through which stages it came, weight
// gradients in which order they were summed.
#include "pipeline/timed_stage.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/base/error.hpp>
#include <bellows/comm/mpi_interop.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/pipeline/measure.hpp>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

std::ostream& operator<<(std::ostream& out, ScheduleKind kind) {
    return out << to_string(kind);
}

namespace {

using testing::make_device;
using testing::test_options;
using testing::world;

/// The forward between a backward's halves.
void interleave_pairs(PipelineExecutor& executor, const Schedule& schedule, std::uint64_t rank) {
    const auto& ops = schedule.ops[rank];
    for (std::size_t i = 0; i < ops.size(); ++i)
        if (ops[i].with_next)
            executor.interleave(ops[i].phase, ops[i + 1].phase,
                                {OpKind::InputGradient, OpKind::Forward, OpKind::WeightGradient});
}

/// A stage that fails at one op: when its node is handed in, or as it runs.
class FailingStage : public bench::TimedStage {
public:
    using TimedStage::TimedStage;
    bool when_handed_in = false;
    ScheduleOp at{OpKind::WeightGradient, 0, 1};
    Lane* lane = nullptr;

    TimePoint submit(OpKind op, std::size_t node, std::uint64_t micro_batch, std::uint64_t slot,
                     std::span<const TimePoint> waits) override {
        if (op == at.kind && micro_batch == at.micro_batch) {
            if (when_handed_in)
                throw Error(ErrorCode::InvalidArgument, "a stage that fails");
            LaneJob job;
            job.name = "failing";
            job.step = [](LaneContext&) -> Progress {
                throw Error(ErrorCode::InvalidArgument, "a stage that fails");
            };
            lane->post(std::move(job));
        }
        return TimedStage::submit(op, node, micro_batch, slot, waits);
    }
};

/// A stage whose ops compute in their first node and move tokens in the second, and which keeps
/// what it is handed.
class TwoNodeStage : public bench::TimedStage {
public:
    struct Handed {
        ScheduleOp op;
        std::vector<TimePoint> waits; ///< of the first node
        TimePoint computed, done;
    };
    TwoNodeStage(Device& device, Lane& lane, const Schedule& schedule, std::uint64_t rank,
                 std::uint32_t phase, const StageCosts& costs)
        : TimedStage(device, lane, schedule, rank, phase, costs), lane_(lane), phase_(phase) {}

    std::size_t num_nodes(OpKind) const override { return 2; }
    bool computes(OpKind, std::size_t node) const override { return node == 0; }
    TimePoint submit(OpKind op, std::size_t node, std::uint64_t micro_batch, std::uint64_t slot,
                     std::span<const TimePoint> waits) override {
        if (node == 0) {
            const TimePoint done = TimedStage::submit(op, 0, micro_batch, slot, waits);
            handed.push_back({{op, phase_, micro_batch}, {waits.begin(), waits.end()}, done, {}});
            return done;
        }
        tokens.emplace_back(ScheduleOp{op, phase_, micro_batch},
                            waits_for(waits, handed.back().computed));
        LaneJob job;
        job.name = "tokens";
        job.step = [](LaneContext&) { return Progress::Done; };
        return handed.back().done = lane_.post(std::move(job));
    }

    static bool waits_for(std::span<const TimePoint> waits, const TimePoint& wanted) {
        return std::ranges::any_of(
            waits, [&](const TimePoint& wait) { return wait.ticket() == wanted.ticket(); });
    }

    std::vector<Handed> handed;
    /// Second nodes, and whether they wait for the first node before.
    std::vector<std::pair<ScheduleOp, bool>> tokens;

private:
    Lane& lane_;
    std::uint32_t phase_;
};

/// A device and what an executor of all ranks needs.
template <class Stage = bench::TimedStage>
struct Rig {
    Rig(SyncMode mode, Schedule made) : schedule(std::move(made)) {
        DeviceOptions options = test_options();
        options.sync = mode;
        options.trace = true;
        device = make_device(options);
        thread.emplace(*device, "host");
        activations.emplace(*device, world(), *activations_transport, *thread);
        gradients.emplace(*device, world(), *gradients_transport, *thread);
        lane.emplace(thread->add_lane("stages"));
        std::vector<PipelineChunk*> chunks;
        for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase) {
            stages.push_back(std::make_unique<Stage>(*device, *lane, schedule, rank, phase,
                                                     StageCosts{0, 0, 0, {}}));
            chunks.push_back(stages.back().get());
        }
        std::vector<int> world_ranks;
        for (int i = 0; i < world().size(); ++i)
            world_ranks.push_back(i);
        executor.emplace(*device, schedule, rank, world_ranks, chunks,
                         PipelinePipes{&*activations, &*gradients});
    }

    Schedule schedule;
    std::uint64_t rank = static_cast<std::uint64_t>(world().rank());
    std::unique_ptr<Device> device;
    std::vector<std::unique_ptr<Stage>> stages; // jobs of the thread use them
    std::unique_ptr<Transport> activations_transport = open_transport(world()),
                               gradients_transport = open_transport(world());
    std::optional<HostThread> thread;
    std::optional<Pipe> activations, gradients;
    std::optional<Lane> lane;
    std::optional<PipelineExecutor> executor;
};

/// Of as many ranks as there are; none where the kind wants an even number.
std::optional<Schedule> schedule_of(ScheduleKind kind) {
    const auto ranks = static_cast<std::uint64_t>(world().size());
    if (kind == ScheduleKind::DualPipe && ranks % 2 != 0)
        return std::nullopt;
    return make_schedule({kind, ranks, 3 * ranks + (ranks % 2 == 0 ? 0 : ranks)});
}

constexpr std::array kModes = {SyncMode::Overlap, SyncMode::Shuffle, SyncMode::Serial};

class Executor : public ::testing::TestWithParam<ScheduleKind> {};

TEST_P(Executor, EveryMicroBatchGoesThroughEveryStageAndBack) {
    const auto schedule = schedule_of(GetParam());
    if (!schedule)
        GTEST_SKIP() << "an even number of ranks";
    for (const SyncMode mode : kModes) {
        Rig<> rig(mode, *schedule);
        interleave_pairs(*rig.executor, *schedule, rig.rank);
        rig.executor->run();
        rig.device->wait_idle();
        rig.device->take_trace();
        rig.executor->run();
        for (std::uint32_t phase = 0; phase < rig.stages.size(); ++phase)
            EXPECT_EQ(rig.stages[phase]->sum(), rig.stages[phase]->expected_sum(2))
                << "phase " << phase;
        rig.device->wait_idle();
        // Each op shows in the trace; on the one lane they run one after another.
        const auto& ops = schedule->ops[rig.rank];
        const RankTimes times = times_of_rank(*schedule, rig.rank, rig.device->take_trace());
        ASSERT_EQ(times.ops.size(), ops.size());
        for (std::size_t i = 0; i < ops.size(); ++i) {
            EXPECT_LT(times.ops[i].start, times.ops[i].end) << to_name(ops[i]);
            if (i > 0 && !ops[i - 1].with_next) {
                EXPECT_LE(times.ops[i - 1].end, times.ops[i].start) << to_name(ops[i]);
            }
        }
    }
}

TEST_P(Executor, ForwardsAloneGoThroughEveryStage) {
    const auto schedule = schedule_of(GetParam());
    if (!schedule)
        GTEST_SKIP() << "an even number of ranks";
    for (const SyncMode mode : kModes) {
        Rig<> rig(mode, forwards_of(*schedule));
        for (int step = 0; step < 2; ++step)
            rig.executor->run();
        for (const auto& stage : rig.stages) {
            EXPECT_EQ(stage->forward_sum(), stage->expected_forward_sum(2));
            EXPECT_EQ(stage->sum(), 0u);
        }
        rig.device->wait_idle();
    }
}

INSTANTIATE_TEST_SUITE_P(Kinds, Executor,
                         ::testing::Values(ScheduleKind::GPipe, ScheduleKind::OneFOneB,
                                           ScheduleKind::Interleaved, ScheduleKind::ZbH1,
                                           ScheduleKind::ZbH2, ScheduleKind::ZbV,
                                           ScheduleKind::DualPipe, ScheduleKind::DualPipeV),
                         [](const auto& kind) {
                             std::string name = to_string(kind.param);
                             std::erase(name, (char)45);
                             return "Kind" + name;
                         });

/// One message to another rank per micro-batch and direction.
TEST_P(Executor, WhatGoesToTheSameRankTakesNoPipe) {
    const auto schedule = schedule_of(GetParam());
    if (!schedule)
        GTEST_SKIP() << "an even number of ranks";
    Rig<> rig(SyncMode::Overlap, *schedule);
    rig.executor->run();
    rig.device->wait_idle();
    const auto places = chunk_places(*schedule);
    const std::uint64_t of_stream = schedule->num_micro_batches / schedule->num_streams;
    std::uint64_t forwards = 0, backwards = 0; // that leave for another rank
    for (const ScheduleChunk& chunk : schedule->chunks[rig.rank]) {
        const auto& stream = places[chunk.stream];
        const auto elsewhere = [&](std::uint64_t stage) {
            return stage < stream.size() && stream[stage].rank != rig.rank;
        };
        forwards += elsewhere(chunk.stage + 1) ? of_stream : 0;
        backwards += elsewhere(chunk.stage - 1) ? of_stream : 0; // of stage 0 none
    }
    EXPECT_EQ(rig.activations->stats().messages_sent, forwards);
    EXPECT_EQ(rig.gradients->stats().messages_sent, backwards);
    EXPECT_EQ(rig.stages.front()->sum(), rig.stages.front()->expected_sum(1));
}

/// Where copies have a queue of their own, which CPU drivers do not have, it begins behind what the
/// last one computes; else behind all that was handed in before.
TEST(ExecutorOrder, WhatLeavesIsNotHeldUpByTheNextOfItsKind) {
    if (world().size() == 1)
        GTEST_SKIP() << "nothing leaves one rank";
    const auto ranks = static_cast<std::uint64_t>(world().size());
    Rig<TwoNodeStage> rig(SyncMode::Overlap,
                          make_schedule({ScheduleKind::OneFOneB, ranks, 3 * ranks}));
    rig.executor->run();
    rig.device->wait_idle();
    const bool one_queue = !rig.device->distinct_queues(QueueRole::Compute, QueueRole::TransferOut);
    const auto& handed = rig.stages.front()->handed;
    std::size_t behind = 0;
    for (std::size_t i = 1; i < handed.size(); ++i) {
        const auto before =
            std::find_if(handed.rend() - static_cast<std::ptrdiff_t>(i), handed.rend(),
                         [&](const auto& other) { return other.op.kind == handed[i].op.kind; });
        const bool leaves =
            handed[i].op.kind == OpKind::Forward ? rig.rank + 1 < ranks : rig.rank > 0;
        if (before == handed.rend() || !leaves || handed[i].op.kind == OpKind::WeightGradient)
            continue;
        const TimePoint& expected = one_queue ? handed[i - 1].done : before->computed;
        EXPECT_TRUE(TwoNodeStage::waits_for(handed[i].waits, expected)) << to_name(handed[i].op);
        ++behind;
    }
    EXPECT_GT(behind, 0u);
}

/// Weight gradients that fill begin behind what comes before them, of a Backward as of its halves.
TEST(ExecutorOrder, WeightGradientsFillABackwardThatIsAlone) {
    const auto ranks = static_cast<std::uint64_t>(world().size());
    const Schedule whole = make_schedule({ScheduleKind::OneFOneB, ranks, 3 * ranks});
    for (const Schedule& schedule : {whole, split_backwards(whole)})
        for (const SyncMode mode : kModes) {
            Rig<TwoNodeStage> rig(mode, schedule);
            rig.executor->fill(0, {{OpKind::InputGradient, 0},
                                   {OpKind::WeightGradient, 1},
                                   {OpKind::InputGradient, 1},
                                   {OpKind::WeightGradient, 0}});
            rig.executor->run();
            rig.device->wait_idle();
            EXPECT_EQ(rig.stages.front()->sum(), rig.stages.front()->expected_sum(1));
            // What does not fill comes behind the gradient that leaves.
            const auto& handed = rig.stages.front()->handed;
            for (std::size_t i = 1; i < handed.size() && rig.rank > 0; ++i)
                if (handed[i].op.kind == OpKind::WeightGradient) {
                    ASSERT_EQ(handed[i - 1].op.kind, OpKind::InputGradient);
                    EXPECT_TRUE(TwoNodeStage::waits_for(handed[i].waits, handed[i - 1].done))
                        << to_name(handed[i].op);
                }
            std::vector<ScheduleOp> tokens; // handed in as second nodes
            for (const auto& [op, behind] : rig.stages.front()->tokens) {
                tokens.push_back(op);
                if (op.kind == OpKind::WeightGradient) {
                    EXPECT_TRUE(behind) << to_name(op);
                }
            }
            std::vector<ScheduleOp> expected;
            for (const ScheduleOp& op : whole.ops[rig.rank]) {
                if (op.kind == OpKind::Backward)
                    expected.push_back({OpKind::WeightGradient, 0, op.micro_batch});
                expected.push_back({op.kind == OpKind::Backward ? OpKind::InputGradient : op.kind,
                                    0, op.micro_batch});
            }
            EXPECT_EQ(tokens, expected);
        }
}

/// What ranks that wait for it see: comm_failing_together_test (pipes), e2e_faults_test.
TEST(ExecutorAlone, AStageThatFailsIsHeardOf) {
    if (world().size() != 1)
        GTEST_SKIP() << "one rank does";
    for (const bool when_handed_in : {true, false}) {
        Rig<FailingStage> rig(SyncMode::Overlap, make_schedule({.ranks = 1, .micro_batches = 3}));
        rig.stages.front()->lane = &*rig.lane;
        rig.stages.front()->when_handed_in = when_handed_in;
        const auto run = [&] {
            rig.executor->run();
            rig.device->wait_idle();
        };
        try {
            run();
            ADD_FAILURE() << "nothing was heard of it";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
            EXPECT_NE(error.message().find("a stage that fails"), std::string::npos);
        }
        if (!when_handed_in) {
            EXPECT_THROW(run(), Error); // the device has failed
        }
    }
}

TEST(ExecutorAlone, NumbersThatDoNotFitAreRefused) {
    if (world().size() != 1)
        GTEST_SKIP() << "one rank does";
    const auto device = make_device();
    const Schedule two = make_schedule({.ranks = 2, .micro_batches = 2});
    const auto make = [&](std::uint64_t rank, std::vector<int> ranks,
                          std::vector<PipelineChunk*> chunks) {
        PipelineExecutor executor(*device, two, rank, std::move(ranks), std::move(chunks), {});
    };
    EXPECT_THROW(make(2, {0, 1}, {nullptr}), Error);
    EXPECT_THROW(make(0, {0}, {nullptr}), Error);
    EXPECT_THROW(make(0, {0, 1}, {}), Error);
    EXPECT_THROW(make(0, {0, 1}, {nullptr}), Error); // no pipes

    Rig<TwoNodeStage> rig(SyncMode::Overlap, make_schedule({.ranks = 1, .micro_batches = 2}));
    constexpr auto kInput = OpKind::InputGradient, kWeight = OpKind::WeightGradient;
    const std::vector<BackwardNode> good = {{kInput, 0}, {kWeight, 1}, {kInput, 1}, {kWeight, 0}};
    EXPECT_NO_THROW(rig.executor->fill(0, good));
    EXPECT_THROW(rig.executor->fill(1, good), Error);
    EXPECT_THROW(rig.executor->fill(0, {{kInput, 0}, {kInput, 1}, {kWeight, 0}}), Error);
    EXPECT_THROW(rig.executor->fill(0, {{kInput, 1}, {kInput, 0}, {kWeight, 0}, {kWeight, 1}}),
                 Error);
    EXPECT_THROW(rig.executor->fill(0, {{kInput, 0}, {kInput, 1}, {kWeight, 1}, {kWeight, 1}}),
                 Error);
}

} // namespace
} // namespace bellows
