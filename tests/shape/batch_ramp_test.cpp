// SPDX-License-Identifier: MIT
// How a batch grows: sizes of steps, and where in the order of the data they begin.
#include "support/temporary_folder.hpp"

#include <bellows/shape/batch_ramp.hpp>
#include <bellows/shape/presets.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace bellows {
namespace {

std::vector<std::uint64_t> batches(const BatchRamp& ramp, std::uint64_t steps) {
    std::vector<std::uint64_t> all;
    for (std::uint64_t step = 0; step < steps; ++step)
        all.push_back(ramp.batch(step));
    return all;
}

TEST(BatchRamp, GrowsByIncrements) {
    const BatchRamp none{.full = 7};
    EXPECT_EQ(batches(none, 3), (std::vector<std::uint64_t>{7, 7, 7}));
    EXPECT_EQ(none.before(3), 21u);
    EXPECT_EQ(none.sizes(), std::vector<std::uint64_t>{7});
    const BatchRamp ramp{.full = 10, .start = 4, .increment = 2, .steps = 7};
    EXPECT_EQ(ramp.sizes(), (std::vector<std::uint64_t>{4, 6, 8, 10}));
    EXPECT_EQ(batches(ramp, 9), (std::vector<std::uint64_t>{4, 4, 4, 6, 6, 8, 8, 10, 10}));
    const BatchRamp level{.full = 4, .start = 4, .increment = 4, .steps = 3};
    EXPECT_EQ(batches(level, 4), (std::vector<std::uint64_t>{4, 4, 4, 4}));
    EXPECT_EQ(level.before(4), 16u);
}

TEST(BatchRamp, CountsWhatCameBefore) {
    for (const std::uint64_t increment : {1, 3, 5, 15})
        for (const std::uint64_t steps : {1, 2, 7, 15, 16, 40, 101}) {
            const BatchRamp ramp{.full = 32, .start = 2, .increment = increment, .steps = steps};
            std::uint64_t sum = 0;
            for (std::uint64_t step = 0; step < 120; ++step) {
                ASSERT_EQ(ramp.before(step), sum) << increment << " " << steps << " " << step;
                sum += ramp.batch(step);
            }
        }
    // As of a long training: 3072 to 15360 sequences in some 12,000 steps.
    const BatchRamp v3{.full = 15360, .start = 3072, .increment = 512, .steps = 12000};
    std::uint64_t sum = 0;
    for (std::uint64_t step = 0; step < 20000; ++step)
        sum += v3.batch(step);
    EXPECT_EQ(v3.before(20000), sum);
}

TEST(BatchRamp, SizesThatDoNotFitAreRefused) {
    const ModelConfig model = parse_model_config(preset_text("tiny"), "tiny");
    TrainingShape shape;
    shape.batch = 32;
    shape.micro_batches = 8;
    const auto check = [&](std::uint64_t ranks = 1) { resolve_layout(model, shape, ranks); };
    const auto refused = [&](const char* word, std::uint64_t ranks = 1) {
        EXPECT_BELLOWS_ERROR((check(ranks), 0), InvalidArgument, word);
    };
    shape.batch_ramp_steps = 5;
    refused("without batch_start");
    shape.batch_start = 8;
    EXPECT_NO_THROW(check());
    EXPECT_EQ(batch_ramp(shape).sizes(), (std::vector<std::uint64_t>{8, 16, 24, 32}));
    shape.batch_increment = 5;
    refused("whole increments of 5");
    shape.batch_increment = 2;
    refused("multiples of the 4");
    shape.batch_increment = 4;
    EXPECT_NO_THROW(check());
    EXPECT_NO_THROW(check(4));
    shape.batch_start = 64;
    refused("batch_start = 64");
    shape.batch_start = 8;
    shape.batch_ramp_steps = 0;
    refused("at least one");
    shape.batch_ramp_steps = 5;
    shape.pp = 2; // dualpipe takes even numbers of micro-batches, at least four
    shape.pipeline = ScheduleKind::DualPipe;
    refused("2 micro-batches", 2);
    shape.batch_start = 16;
    shape.batch_increment = 8;
    EXPECT_NO_THROW(check(2));
}

} // namespace
} // namespace bellows
