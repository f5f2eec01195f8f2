// SPDX-License-Identifier: MIT
// The executor with stages of numbers: what arrives tells through which stages it came, weight
// gradients in which order they were summed.
#include "support/mpi_test.hpp"
#include "support/test_device.hpp"

#include <bellows/comm/mpi_interop.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/pipeline/executor.hpp>

#include <array>
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

/// Depends on both and on their order.
std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    return (a ^ (b + 0x9e3779b97f4a7c15u)) * 0xff51afd7ed558ccdu + (a >> 31);
}

/// What goes into and comes out of a stage: one number.
enum Place { kInput, kOutput, kOutputGradient, kInputGradient, kNumPlaces };

/// A stage whose forward mixes its number into what comes, and its backward again.
class NumberStage : public PipelineChunk {
public:
    NumberStage(Device& device, Lane& lane, std::uint64_t stage, std::uint64_t num_stages,
                std::uint64_t slots)
        : lane_(lane), stage_(stage), first_(stage == 0), last_(stage + 1 == num_stages) {
        for (std::uint64_t slot = 0; slot < slots; ++slot)
            for (std::array<Buffer, kNumPlaces>& buffers = slots_.emplace_back();
                 Buffer & buffer : buffers)
                buffer =
                    Buffer(device, {.name = "number", .bytes = 16, .kind = MemoryKind::Readback});
    }

    void forward(std::uint64_t micro_batch, std::uint64_t slot) override {
        post(slot, kInput, kOutput,
             [=, this](std::uint64_t in) { return mix(first_ ? micro_batch : in, stage_); });
    }
    void input_gradient(std::uint64_t, std::uint64_t slot) override {
        // The last stage starts from what it made.
        post(slot, last_ ? kOutput : kOutputGradient, kInputGradient,
             [=, this](std::uint64_t in) { return mix(in, 1000 + stage_); });
    }
    void weight_gradient(std::uint64_t micro_batch, std::uint64_t slot) override {
        post(slot, kInputGradient, kInputGradient, [=, this](std::uint64_t in) {
            sum_ = mix(mix(sum_, in), micro_batch);
            return in;
        });
    }
    TensorView input(std::uint64_t slot) const override { return number(slot, kInput); }
    TensorView output(std::uint64_t slot) const override { return number(slot, kOutput); }
    TensorView input_gradient(std::uint64_t slot) const override {
        return number(slot, kInputGradient);
    }
    TensorView output_gradient(std::uint64_t slot) const override {
        return number(slot, kOutputGradient);
    }
    std::uint64_t sum() {
        last_job_.wait();
        return sum_;
    }

private:
    TensorView number(std::uint64_t slot, Place place) const {
        return slots_[slot][place].tensor(DType::U32, {2});
    }
    template <class F>
    void post(std::uint64_t slot, Place from, Place to, F make) {
        const Buffer &source = slots_[slot][from], &target = slots_[slot][to];
        LaneJob job;
        job.name = "stage " + std::to_string(stage_);
        job.accesses = {{source.view(), Access::Read}, {target.view(), Access::Write}};
        job.step = [&source, &target, make](LaneContext&) {
            target.mapped_as<std::uint64_t>()[0] = make(source.mapped_as<std::uint64_t>()[0]);
            return Progress::Done;
        };
        last_job_ = lane_.post(std::move(job));
    }

    Lane& lane_;
    std::uint64_t stage_;
    bool first_, last_;
    std::vector<std::array<Buffer, kNumPlaces>> slots_;
    std::uint64_t sum_ = 0; ///< on the lane
    TimePoint last_job_;
};

/// What a stage must have summed after `steps` steps.
std::uint64_t expected_sum(const Schedule& schedule, const ScheduleChunk& chunk, int steps) {
    const std::uint64_t first = schedule.first_of_stream(chunk.stream);
    std::uint64_t sum = 0;
    for (int step = 0; step < steps; ++step)
        for (std::uint64_t i = 0; i < schedule.num_micro_batches / schedule.num_streams; ++i) {
            std::uint64_t value = first + i;
            for (std::uint64_t stage = 0; stage < schedule.num_stages; ++stage)
                value = mix(value, stage);
            for (std::uint64_t stage = schedule.num_stages; stage-- > chunk.stage;)
                value = mix(value, 1000 + stage);
            sum = mix(mix(sum, value), first + i);
        }
    return sum;
}

class Executor : public ::testing::TestWithParam<ScheduleKind> {};

TEST_P(Executor, EveryMicroBatchGoesThroughEveryStageAndBack) {
    const auto ranks = static_cast<std::uint64_t>(world().size());
    if (GetParam() == ScheduleKind::DualPipe && ranks % 2 != 0)
        GTEST_SKIP() << "an even number of ranks";
    for (const SyncMode mode : {SyncMode::Overlap, SyncMode::Shuffle, SyncMode::Serial}) {
        DeviceOptions options = test_options();
        options.sync = mode;
        const auto device = make_device(options);
        const auto activations_transport = open_transport(world());
        const auto gradients_transport = open_transport(world());
        HostThread thread(*device, "host");
        Pipe activations(*device, world(), *activations_transport, thread);
        Pipe gradients(*device, world(), *gradients_transport, thread);
        Lane lane = thread.add_lane("stages");
        const Schedule schedule =
            make_schedule({GetParam(), ranks, 3 * ranks + (ranks % 2 == 0 ? 0 : ranks)});
        const auto rank = static_cast<std::uint64_t>(world().rank());
        std::vector<std::unique_ptr<NumberStage>> stages;
        std::vector<PipelineChunk*> chunks;
        for (std::uint32_t phase = 0; phase < schedule.chunks[rank].size(); ++phase) {
            stages.push_back(std::make_unique<NumberStage>(
                *device, lane, schedule.chunks[rank][phase].stage, schedule.num_stages,
                schedule.peak_in_flight(rank, phase)));
            chunks.push_back(stages.back().get());
        }
        std::vector<int> world_ranks;
        for (int i = 0; i < world().size(); ++i)
            world_ranks.push_back(i);
        PipelineExecutor executor(schedule, rank, world_ranks, chunks, {&activations, &gradients});
        executor.run();
        executor.run();
        for (std::uint32_t phase = 0; phase < stages.size(); ++phase)
            EXPECT_EQ(stages[phase]->sum(), expected_sum(schedule, schedule.chunks[rank][phase], 2))
                << "phase " << phase;
        device->wait_idle();
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
    const Schedule two = make_schedule({.ranks = 2, .micro_batches = 2});
    const auto make = [&](std::uint64_t rank, std::vector<int> ranks,
                          std::vector<PipelineChunk*> chunks) {
        PipelineExecutor executor(two, rank, std::move(ranks), std::move(chunks), {});
    };
    EXPECT_THROW(make(2, {0, 1}, {nullptr}), Error);
    EXPECT_THROW(make(0, {0}, {nullptr}), Error);
    EXPECT_THROW(make(0, {0, 1}, {}), Error);
    EXPECT_THROW(make(0, {0, 1}, {nullptr}), Error); // no pipes
}

} // namespace
} // namespace bellows
