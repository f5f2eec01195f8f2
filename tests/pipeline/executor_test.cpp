// SPDX-License-Identifier: MIT
// The executor with stages of numbers: what arrives tells through which stages it came, weight
// gradients in which order they were summed.
#include "pipeline/timed_stage.hpp"
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/comm/mpi_interop.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/pipeline/executor.hpp>
#include <bellows/pipeline/measure.hpp>

#include <algorithm>
#include <memory>
#include <ostream>

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

class Executor : public ::testing::TestWithParam<ScheduleKind> {};

TEST_P(Executor, EveryMicroBatchGoesThroughEveryStageAndBack) {
    const auto ranks = static_cast<std::uint64_t>(world().size());
    if (GetParam() == ScheduleKind::DualPipe && ranks % 2 != 0)
        GTEST_SKIP() << "an even number of ranks";
    for (const SyncMode mode : {SyncMode::Overlap, SyncMode::Shuffle, SyncMode::Serial}) {
        DeviceOptions options = test_options();
        options.sync = mode;
        options.trace = true;
        const auto device = make_device(options);
        std::vector<std::unique_ptr<bench::TimedStage>> stages; // jobs of the thread use them
        const auto activations_transport = open_transport(world());
        const auto gradients_transport = open_transport(world());
        HostThread thread(*device, "host");
        Pipe activations(*device, world(), *activations_transport, thread);
        Pipe gradients(*device, world(), *gradients_transport, thread);
        Lane lane = thread.add_lane("stages");
        const Schedule schedule =
            make_schedule({GetParam(), ranks, 3 * ranks + (ranks % 2 == 0 ? 0 : ranks)});
        const auto rank = static_cast<std::uint64_t>(world().rank());
        std::vector<PipelineChunk*> chunks;
        for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase) {
            stages.push_back(std::make_unique<bench::TimedStage>(*device, lane, schedule, rank,
                                                                 phase, StageCosts{0, 0, 0, {}}));
            chunks.push_back(stages.back().get());
        }
        std::vector<int> world_ranks;
        for (int i = 0; i < world().size(); ++i)
            world_ranks.push_back(i);
        PipelineExecutor executor(*device, schedule, rank, world_ranks, chunks,
                                  {&activations, &gradients});
        interleave_pairs(executor, schedule, rank);
        executor.run();
        device->wait_idle();
        device->take_trace();
        executor.run();
        for (std::uint32_t phase = 0; phase < stages.size(); ++phase)
            EXPECT_EQ(stages[phase]->sum(), stages[phase]->expected_sum(2)) << "phase " << phase;
        device->wait_idle();
        // Each op shows in the trace; on the one lane they run one after another.
        const auto& ops = schedule.ops[rank];
        const RankTimes times = times_of_rank(schedule, rank, device->take_trace());
        ASSERT_EQ(times.ops.size(), ops.size());
        for (std::size_t i = 0; i < ops.size(); ++i) {
            EXPECT_LT(times.ops[i].start, times.ops[i].end) << to_name(ops[i]);
            if (i > 0 && !ops[i - 1].with_next) {
                EXPECT_LE(times.ops[i - 1].end, times.ops[i].start) << to_name(ops[i]);
            }
        }
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
}

} // namespace
} // namespace bellows
