// SPDX-License-Identifier: MIT
// Ranks with copies of the same parameters, each of which updates a part: that they learn what one
// rank learns, go on from a checkpoint bit by bit in every precision, and take the memory that was
// estimated.
#include "support/mpi_test.hpp"
#include "support/shared_folder.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"
#include "support/trained_tensors.hpp"

#include <bellows/plan/memory_estimate.hpp>
#include <bellows/shape/sharded_ranges.hpp>
#include <bellows/train/checkpoints.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

constexpr std::uint64_t kSteps = 3;

RunConfig run_in(const std::string& precision) {
    RunConfig run = small_run();
    run.model = wide_model(); // matrices of which ranks have a part each
    run.train.batch = 8;
    run.train.lr = 1e-2;
    from_text(run.train.precision, precision);
    return run;
}

/// Experts have copies, too.
RunLayout copies() {
    const auto ranks = static_cast<std::uint32_t>(world().size());
    return {1, ranks, ranks / 2};
}

/// A step's loss, and all that comes of it.
struct Outcome {
    double loss = 0;
    std::vector<std::vector<float>> tensors;

    bool operator==(const Outcome&) const = default;
};

Outcome step_of(Trainer& trainer, Device& device, std::uint64_t step) {
    const double loss = trainer.step(step, fill_sequence).loss;
    Outcome outcome{loss, trained_tensors(trainer)};
    device.wait_idle();
    return outcome;
}

class ResumeIn : public ::testing::TestWithParam<const char*> {
protected:
    ~ResumeIn() override {
        world().control().barrier(std::chrono::seconds(60)); // before the folder goes
    }
    const RunConfig config_ = run_in(GetParam());
    const std::unique_ptr<Device> device_ = testing::make_device(testing::test_options());
    const SharedFolder folder_;
};

TEST_P(ResumeIn, GoesOnBitByBit) {
    SavedRun options;
    options.config = config_;
    options.layout = copies();
    options.out = folder_.path();
    Outcome expected;
    {
        Trainer trainer(*device_, world(), config_, options.layout);
        for (std::uint64_t step = 0; step < kSteps; ++step) {
            expected = step_of(trainer, *device_, step);
            if (step + 2 == kSteps)
                save_checkpoint(options.out, {{kConfigFile, options.config_text()}}, trainer,
                                world(), step + 1);
        }
    }
    const Checkpoint checkpoint = Checkpoint::open(options.out);
    Trainer trainer(*device_, world(), config_, options.layout);
    load_checkpoint(checkpoint, trainer, world());
    ALL_RANKS_TRUE(step_of(trainer, *device_, kSteps - 1) == expected);
    // Each tensor stands in one shard, and is what the ranks that go on from it have.
    std::size_t tensors = 0;
    for (const Parameter& parameter : trainer.parameters().all())
        tensors += checkpoint.find("model", parameter.info.name) != nullptr ? 1 : 0;
    ALL_RANKS_TRUE(tensors == trainer.parameters().all().size());
}

TEST_P(ResumeIn, LearnsWhatOneRankLearns) {
    World single = World::single();
    Trainer trainer(*device_, world(), config_, copies()), alone(*device_, single, config_, {});
    for (std::uint64_t step = 0; step < kSteps; ++step) {
        const StepResult all = trainer.step(step, fill_sequence);
        const StepResult one = alone.step(step, fill_sequence);
        device_->wait_idle();
        // f32: in another order of sums; others: some tokens take other experts, or blocks of 128
        // tokens are others.
        const double near = GetParam() == std::string("f32") ? 1e-5 : 2e-2;
        ALL_RANKS_TRUE(std::abs(all.loss - one.loss) <= near * one.loss);
        ALL_RANKS_TRUE(std::abs(all.grad_norm - one.grad_norm) <= 10 * near * one.grad_norm);
    }
}

TEST_P(ResumeIn, WhatAdamwKeepsTakesWhatWasEstimated) {
    Trainer trainer(*device_, world(), config_, copies());
    trainer.step(0, fill_sequence);
    device_->wait_idle();
    const auto bytes = device_->memory_report().of(MemoryCategory::Optimizer).bytes;
    const auto most = estimate_memory(config_.model, config_.train, copies(), 0, {})
                          .of(MemoryCategory::Optimizer);
    std::uint64_t all = 0; // f32 of all, as one rank would have them
    const std::uint64_t kinds = config_.train.precision == Precision::F32 ? 2 : 3;
    for (const Parameter& parameter : trainer.parameters().all())
        all += parameter.info.trainable() ? kinds * 4 * stored_elements(parameter.info) : 0;
    ALL_RANKS_TRUE(bytes <= most);
    ALL_RANKS_TRUE(bytes * 10 >= most * 7); // the estimate is of the rank with most
    ALL_RANKS_TRUE(bytes * 10 <= all * 7);
}

INSTANTIATE_TEST_SUITE_P(Precisions, ResumeIn, ::testing::Values("f32", "bf16", "fp8"),
                         [](const auto& of) { return std::string(of.param); });

} // namespace
} // namespace bellows
