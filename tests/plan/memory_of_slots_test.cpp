// SPDX-License-Identifier: MIT
// What slots for experts add to a run's memory, by the estimate and really.
#include "support/mpi_test.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"

#include <bellows/plan/memory_estimate.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/train/trainer.hpp>

#include <cmath>
#include <string>

namespace bellows {
namespace {

using testing::world;

class MemoryOfSlots : public ::testing::TestWithParam<const char*> {};

struct Memory {
    MemoryEstimate estimate;
    MemoryReport report;
};

Memory memory_of(const RunConfig& run, const RunLayout& layout) {
    const auto device = testing::make_device();
    const ComputeMemory compute{
        .tiles = !device->info().is_cpu,
        .copies = wants_copies_of_weights(*device, run.train.precision, nullptr),
        .apart = device->distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred),
        .experts_apart =
            device->distinct_queues(QueueRole::ComputeDeferred, QueueRole::ComputeDeferredBeside)};
    Memory memory{estimate_memory(run.model, run.train, layout, 0, compute), {}};
    Trainer trainer(*device, world(), run, layout);
    for (std::uint64_t step = 0; step < 2; ++step)
        trainer.step(step, fill_sequence);
    device->wait_idle();
    memory.report = device->memory_report();
    return memory;
}

TEST_P(MemoryOfSlots, IsNearWhatTheyAddToARank) {
    RunConfig run = load_run_config("tiny");
    from_text(run.train.precision, GetParam());
    run.train.batch = 4;
    run.train.seq = 64;
    const auto ranks = static_cast<std::uint32_t>(world().size());
    const RunLayout layout{1, ranks, ranks};
    const Memory without = memory_of(run, layout);
    run.train.eplb_every = 1;
    run.train.eplb_slots = run.model.routed_experts * 3 / 2;
    const Memory with = memory_of(run, layout);
    SCOPED_TRACE("estimated " + describe_memory(with.estimate.bytes));
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i) {
        const auto more = [&](const auto& bytes) {
            return static_cast<double>(bytes(with)) - static_cast<double>(bytes(without));
        };
        const double actual =
            more([&](const Memory& m) { return m.report.categories[i].peak_bytes; });
        // Small parts may be off by more; a MiB does not decide whether a run fits.
        EXPECT_NEAR(more([&](const Memory& m) { return m.estimate.bytes[i]; }), actual,
                    0.25 * std::abs(actual) + (1 << 20))
            << to_string(static_cast<MemoryCategory>(i));
    }
}

INSTANTIATE_TEST_SUITE_P(Precisions, MemoryOfSlots, ::testing::Values("f32", "fp8"),
                         [](const auto& of) { return std::string(of.param); });

} // namespace
} // namespace bellows
