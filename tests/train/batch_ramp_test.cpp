// SPDX-License-Identifier: MIT
// A batch that grows: each step has the bits of a run whose batch is of that size, and a run goes
// on from a checkpoint in the middle of it as it would have gone on.
#include "support/mpi_test.hpp"
#include "support/shared_folder.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"
#include "support/trained_tensors.hpp"

#include <bellows/shape/batch_ramp.hpp>
#include <bellows/train/checkpoints.hpp>

#include <bit>
#include <cmath>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

struct Case {
    const char* name;
    bool pipeline; ///< over all ranks; else they are data-parallel
    ScheduleKind kind;
    std::uint64_t batch, micro_batches, start, increment, steps;
    std::uint64_t modules = 0; ///< of multi-token prediction
};

void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

class BatchRampIn : public ::testing::TestWithParam<Case> {
protected:
    ~BatchRampIn() override {
        world().control().barrier(std::chrono::seconds(60)); // before the folder goes
    }

    RunConfig ramped() const {
        const Case& c = GetParam();
        RunConfig run = small_run();
        run.model.mtp_depth = c.modules;
        run.train.batch = c.batch;
        run.train.micro_batches = c.micro_batches;
        run.train.batch_start = c.start;
        run.train.batch_increment = c.increment;
        run.train.batch_ramp_steps = c.steps;
        run.train.pipeline = c.kind;
        run.train.lr = 1e-2;
        run.train.clip_norm = 0.5; // less than the gradient's
        return run;
    }
    /// A run all of whose steps have so many sequences, in micro-batches as large.
    RunConfig of_size(std::uint64_t sequences) const {
        RunConfig run = ramped();
        run.train.micro_batches = micro_batches_of(run.train, sequences);
        run.train.batch = sequences;
        run.train.batch_start = run.train.batch_increment = run.train.batch_ramp_steps = 0;
        return run;
    }
    RunLayout layout() const {
        const auto ranks = static_cast<std::uint32_t>(world().size());
        return GetParam().pipeline ? RunLayout{ranks, 1, 1} : RunLayout{1, ranks, ranks};
    }
    void save(Trainer& trainer, std::uint64_t steps, const std::filesystem::path& folder) {
        device_->wait_idle();
        save_checkpoint(folder, {{kConfigFile, to_toml(ramped())}}, trainer, world(), steps);
    }

    const std::unique_ptr<Device> device_ = testing::make_device(testing::test_options());
    const SharedFolder folder_;
};

TEST_P(BatchRampIn, EveryStepIsThatOfARunOfItsSize) {
    const RunConfig config = ramped();
    const BatchRamp ramp = batch_ramp(config.train);
    Trainer trainer(*device_, world(), config, layout());
    for (std::uint64_t step = 0; step <= GetParam().steps; ++step) {
        const std::uint64_t size = ramp.batch(step);
        const auto before = folder_.path() / std::to_string(step);
        save(trainer, step, before);
        const StepResult result = trainer.step(step, fill_sequence);
        const std::vector<std::vector<float>> tensors = trained_tensors(trainer);
        ALL_RANKS_TRUE(result.sequences == size);

        Trainer other(*device_, world(), of_size(size), layout());
        load_checkpoint(Checkpoint::open(before), other, world());
        const StepResult expected = other.step(step, fill_sequence);
        ALL_RANKS_TRUE(result.loss == expected.loss);
        ALL_RANKS_TRUE(result.mtp_losses == expected.mtp_losses);
        ALL_RANKS_TRUE(std::abs(result.grad_norm - expected.grad_norm) <=
                       1e-6 * expected.grad_norm);
        // A gradient is that of the whole batch's mean times the ratio of the sizes.
        if (std::has_single_bit(config.train.batch / size) && config.train.batch % size == 0)
            ALL_RANKS_TRUE(trained_tensors(other) == tensors);

        Trainer resumed(*device_, world(), config, layout());
        load_checkpoint(Checkpoint::open(before), resumed, world());
        ALL_RANKS_TRUE(resumed.step(step, fill_sequence).loss == result.loss);
        ALL_RANKS_TRUE(trained_tensors(resumed) == tensors);
    }
    ALL_RANKS_TRUE(trainer.schedule().num_micro_batches == config.train.micro_batches);
}

INSTANTIATE_TEST_SUITE_P(
    Layouts, BatchRampIn,
    ::testing::Values(Case{"data_parallel", false, ScheduleKind::OneFOneB, 8, 4, 2, 2, 3},
                      Case{"one_f_one_b", true, ScheduleKind::OneFOneB, 8, 8, 2, 6, 1, 1},
                      Case{"dualpipe", true, ScheduleKind::DualPipe, 16, 8, 8, 8, 1}),
    [](const auto& of) { return of.param.name; });

} // namespace
} // namespace bellows
