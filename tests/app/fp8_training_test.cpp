// SPDX-License-Identifier: MIT
// Training with FP8 linear layers: the loss goes the way of bf16's, and a run repeats and resumes
// bit by bit.
#include "app/run_checkpoint.hpp"
#include "app/trainer.hpp"

#include "small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

namespace bellows {
namespace {

RunConfig run_with(const char* precision) {
    RunConfig run = small_run();
    run.train.precision = precision;
    run.train.lr = 3e-3;
    return run;
}

std::vector<double> losses(const char* precision, std::uint64_t steps) {
    const auto device = testing::make_device();
    World world = World::single();
    Trainer trainer(*device, world, run_with(precision), {});
    std::vector<double> all;
    for (std::uint64_t step = 0; step < steps; ++step)
        all.push_back(trainer.step(step, fill_sequence).loss);
    device->wait_idle();
    return all;
}

/// Moving averages, each with a tenth of the newest.
std::vector<double> smoothed(std::vector<double> values) {
    for (std::size_t i = 1; i < values.size(); ++i)
        values[i] = 0.9 * values[i - 1] + 0.1 * values[i];
    return values;
}

TEST(Fp8Training, TheLossFollowsBf16) {
    constexpr std::uint64_t kSteps = 60;
    const std::vector<double> fp8 = losses("fp8", kSteps), bf16 = losses("bf16", kSteps);
    EXPECT_NE(fp8, bf16) << "nothing was computed in FP8";
    const std::vector<double> a = smoothed(fp8), b = smoothed(bf16);
    EXPECT_LT(b.back(), 0.9 * b.front()) << "too little is learnt to compare";
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i)
        worst = std::max(worst, std::abs(a[i] / b[i] - 1));
    RecordProperty("largest_difference", std::to_string(worst));
    // FP8 rounds what enters a product by up to 6 %; a wrong gradient is off by far more.
    EXPECT_LE(worst, 0.005);
}

TEST(Fp8Training, ARunRepeatsAndResumesBitByBit) {
    TemporaryFolder folder;
    TrainOptions options;
    options.config = run_with("fp8");
    options.out = folder.path();
    const auto device = testing::make_device();
    World world = World::single();
    std::vector<double> whole;
    std::filesystem::path saved;
    {
        Trainer trainer(*device, world, options.config, options.layout);
        for (std::uint64_t step = 0; step < 4; ++step) {
            whole.push_back(trainer.step(step, fill_sequence).loss);
            if (step == 1)
                saved = save_checkpoint(options, trainer, world, 2);
        }
        device->wait_idle();
    }
    EXPECT_EQ(losses("fp8", 4), whole);
    Trainer trainer(*device, world, options.config, options.layout);
    load_checkpoint(Checkpoint::open(saved), trainer, world);
    for (std::uint64_t step = 2; step < 4; ++step)
        EXPECT_EQ(trainer.step(step, fill_sequence).loss, whole[step]) << "step " << step;
    device->wait_idle();
}

} // namespace
} // namespace bellows
