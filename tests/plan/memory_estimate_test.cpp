// SPDX-License-Identifier: MIT
// The estimate of a run's memory against what a trainer really allocates, and its refusal.
#include "support/test_device.hpp"

#include <bellows/base/error.hpp>
#include <bellows/plan/memory_estimate.hpp>
#include <bellows/run/kernels.hpp>
#include <bellows/train/trainer.hpp>

#include <gtest/gtest.h>

#include <string>
#include <utility>

namespace bellows {
namespace {

MemoryReport report_of(const RunConfig& run, const RunLayout& layout, bool roles_apart = false) {
    DeviceOptions options = testing::test_options();
    options.roles_apart = roles_apart;
    const auto device = testing::make_device(options);
    World world = World::single();
    Trainer trainer(*device, world, run, layout);
    trainer.step(0, [](std::uint64_t, std::uint64_t index, std::span<std::uint32_t> tokens) {
        for (std::size_t i = 0; i < tokens.size(); ++i)
            tokens[i] = static_cast<std::uint32_t>((index * 37 + i * i) % 250);
    });
    device->wait_idle();
    return device->memory_report();
}

void expect_near(const RunConfig& run, bool roles_apart) {
    const auto device = testing::make_device();
    const RunLayout layout;
    const ComputeMemory compute{
        .tiles = !device->info().is_cpu,
        .copies = wants_copies_of_weights(*device, run.train.precision, nullptr),
        .apart =
            roles_apart || device->distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred),
        .experts_apart = roles_apart || device->distinct_queues(QueueRole::ComputeDeferred,
                                                                QueueRole::ComputeDeferredBeside)};
    MemoryEstimate estimate = estimate_memory(run.model, run.train, layout, 0, compute);
    const MemoryReport report = report_of(run, layout, roles_apart);
    SCOPED_TRACE(std::string(to_text(run.train.precision)) + (roles_apart ? ", roles apart" : "") +
                 ", estimated " + describe_memory(estimate.bytes));
    for (std::size_t i = 0; i < kNumMemoryCategories; ++i) {
        const auto actual = static_cast<double>(report.categories[i].peak_bytes);
        const auto expected = static_cast<double>(estimate.bytes[i]);
        // Small parts may be off by more; a MiB does not decide whether a run fits.
        EXPECT_NEAR(expected, actual, 0.25 * actual + (1 << 20))
            << to_string(static_cast<MemoryCategory>(i));
    }
    EXPECT_NEAR(static_cast<double>(estimate.total()), static_cast<double>(report.peak_bytes),
                0.2 * static_cast<double>(report.peak_bytes));
}

TEST(MemoryEstimate, IsNearWhatATrainerAllocates) {
    for (const char* precision : {"f32", "bf16", "fp8"})
        for (const std::uint64_t micro_batches : {1u, 4u})
            for (const bool roles_apart : {false, true}) {
                RunConfig run = load_run_config("tiny");
                from_text(run.train.precision, precision);
                run.train.micro_batches = micro_batches;
                expect_near(run, roles_apart);
            }
}

TEST(MemoryEstimate, KnowsOtherArchitectures) {
    for (const char* preset : {"tiny-llama", "tiny-qwen3-moe"})
        for (const char* precision : {"f32", "fp8"}) {
            SCOPED_TRACE(preset);
            RunConfig run = load_run_config(preset);
            from_text(run.train.precision, precision);
            run.train.micro_batches = 2;
            expect_near(run, false);
        }
}

TEST(MemoryEstimate, KnowsModulesThatPredictFurtherTokens) {
    RunConfig run = load_run_config("tiny");
    run.train.micro_batches = 2;
    run.model.layers = 3;
    run.model.mtp_depth = 3;
    for (const char* precision : {"f32", "fp8"}) {
        from_text(run.train.precision, precision);
        expect_near(run, false);
    }
}

TEST(MemoryEstimate, KnowsWhatWeightGradientsTakeApart) {
    RunConfig run = load_run_config("tiny");
    run.train.precision = Precision::FP8;
    run.train.micro_batches = 1;
    run.train.batch = 32;
    run.model.hidden = 512; // a weight gradient takes more than an input gradient
    run.model.moe_ffn = run.model.dense_ffn = 128;
    const auto device = testing::make_device();
    const auto scratch = [&](bool apart) {
        const ComputeMemory compute{
            .tiles = !device->info().is_cpu, .apart = apart, .experts_apart = apart};
        return static_cast<double>(
            estimate_memory(run.model, run.train, {}, 0, compute).of(MemoryCategory::Scratch));
    };
    const auto reserved = [&](bool apart) {
        return static_cast<double>(report_of(run, {}, apart).of(MemoryCategory::Scratch).bytes);
    };
    if (device->distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred))
        GTEST_SKIP() << "they always are here";
    const ComputeMemory together{.tiles = !device->info().is_cpu, .apart = true};
    EXPECT_GT(
        scratch(true),
        static_cast<double>(
            estimate_memory(run.model, run.train, {}, 0, together).of(MemoryCategory::Scratch)))
        << "experts' in a scratch of their own";
    const double more = reserved(true) - reserved(false);
    EXPECT_GT(more, 1 << 20);
    EXPECT_NEAR(scratch(true) - scratch(false), more, 0.3 * more);
}

TEST(MemoryEstimate, Fp8KeepsLessForTheBackwardPass) {
    RunConfig run = load_run_config("tiny");
    const auto kept = [&](const char* precision) {
        from_text(run.train.precision, precision);
        const MemoryReport report = report_of(run, {});
        const auto bytes = [&](MemoryCategory category) {
            return static_cast<double>(report.of(category).bytes);
        };
        // Received tokens stay in the exchange's records.
        const double activations =
            bytes(MemoryCategory::Activations) + bytes(MemoryCategory::Communication);
        return std::pair(activations, activations + bytes(MemoryCategory::DeferredWgrad));
    };
    const auto [bf16, bf16_and_deferred] = kept("bf16");
    const auto [fp8, fp8_and_deferred] = kept("fp8");
    RecordProperty("activations_ratio", std::to_string(fp8 / bf16));
    RecordProperty("with_deferred_ratio", std::to_string(fp8_and_deferred / bf16_and_deferred));
    EXPECT_LE(fp8, 0.6 * bf16);
    EXPECT_LT(fp8_and_deferred, bf16_and_deferred) << "what W nodes wait for included";
}

TEST(MemoryEstimate, EveryShareOfALargeModelIsSmaller) {
    RunConfig run = load_run_config("v3-671b");
    run.train.batch = 128;
    run.train.micro_batches = 8;
    run.train.seq = 4096;
    run.train.precision = Precision::BF16;
    const MemoryEstimate whole = estimate_memory(run.model, run.train, {}, 0);
    EXPECT_GT(whole.total(), std::uint64_t{671} * 18 * 1'000'000'000);
    EXPECT_LT(estimate_memory(run.model, run.train, {.pp = 1, .dp = 8, .ep = 8}, 0).total(),
              whole.total() / 4);
    EXPECT_LT(estimate_memory(run.model, run.train, {.pp = 16, .dp = 1, .ep = 1}, 0).total(),
              whole.total() / 8);
}

TEST(MemoryEstimate, SchedulesTakeTheirShares) {
    RunConfig run = load_run_config("tiny");
    run.train.batch = 64;
    run.train.micro_batches = 8;
    const auto of = [&](const char* pipeline, std::uint64_t rank) {
        run.train.pipeline = parse_schedule_kind(pipeline);
        return estimate_memory(run.model, run.train, {.pp = 2, .dp = 1, .ep = 1}, rank);
    };
    const auto activations = [&](const char* pipeline, std::uint64_t rank) {
        return of(pipeline, rank).of(MemoryCategory::Activations);
    };
    // The last rank: one micro-batch, all eight, three, both again.
    EXPECT_EQ(activations("gpipe", 1), 8 * activations("1f1b", 1));
    EXPECT_EQ(activations("zb-h2", 1), 3 * activations("1f1b", 1));
    EXPECT_EQ(activations("zb-h1", 1), 2 * activations("1f1b", 1));
    // Two copies of the parameters, which makes a whole model on each of two ranks.
    run.train.pipeline = parse_schedule_kind("1f1b");
    const std::uint64_t whole =
        estimate_memory(run.model, run.train, {.pp = 1, .dp = 1, .ep = 1}, 0)
            .of(MemoryCategory::Gradients);
    EXPECT_EQ(of("dualpipe", 0).of(MemoryCategory::Gradients), whole);
    EXPECT_EQ(of("dualpipe", 1).of(MemoryCategory::Gradients), whole);
    // Each updates about a half of them.
    run.train.pipeline = parse_schedule_kind("1f1b");
    const std::uint64_t moments =
        estimate_memory(run.model, run.train, {.pp = 1, .dp = 1, .ep = 1}, 0)
            .of(MemoryCategory::Optimizer);
    EXPECT_GT(of("dualpipe", 0).of(MemoryCategory::Optimizer), moments / 2);
    EXPECT_LT(of("dualpipe", 0).of(MemoryCategory::Optimizer), moments * 11 / 20);
    EXPECT_EQ(of("dualpipev", 0).of(MemoryCategory::Gradients) +
                  of("dualpipev", 1).of(MemoryCategory::Gradients),
              whole);
}

TEST(MemoryEstimate, TokensThatPassThroughARankTakeMemoryThere) {
    const RunConfig run = load_run_config("tiny");
    const RunLayout layout{.pp = 1, .dp = 4, .ep = 4};
    MemoryEstimate one = estimate_memory(run.model, run.train, layout, 0);
    MemoryEstimate two = estimate_memory(run.model, run.train, layout, Topology::blocks(4, 2), 0);
    EXPECT_GT(two.of(MemoryCategory::Communication), one.of(MemoryCategory::Communication));
    EXPECT_EQ(two.of(MemoryCategory::Activations), one.of(MemoryCategory::Activations));
}

TEST(MemoryEstimate, RefusesWithTheLargestCategory) {
    MemoryEstimate estimate;
    estimate.of(MemoryCategory::Weights) = 100;
    estimate.of(MemoryCategory::Activations) = 1000;
    EXPECT_NO_THROW(require_memory(estimate, 2200, 2, "a device"));
    try {
        require_memory(estimate, 2199, 2, "a device");
        FAIL() << "1100 bytes twice in 2199";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("most goes into activations"), std::string::npos)
            << error.message();
        EXPECT_NE(error.message().find("for 2 ranks"), std::string::npos) << error.message();
    }
}

} // namespace
} // namespace bellows
