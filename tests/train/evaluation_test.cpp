// SPDX-License-Identifier: MIT
// The loss of held-out text on the stages that train: the same as a step's on the same sequences,
// in every kind of pipeline, and the training goes on with the bits that it has without.
#include "support/mpi_test.hpp"
#include "support/small_run.hpp"
#include "support/temporary_folder.hpp"
#include "support/test_device.hpp"
#include "support/trained_tensors.hpp"

#include <bellows/train/trainer.hpp>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

struct Case {
    const char* name;
    const char* pipeline;
    std::uint32_t pp;
    std::uint64_t micro_batches; ///< of a data-parallel rank
    const char* precision = "f32";
    bool router_bias = true;
};

/// Those that fit the number of ranks; the others of them are data-parallel.
std::vector<Case> cases() {
    std::vector<Case> all = {{"plain", "1f1b", 1, 2},
                             {"plain_fp8", "1f1b", 1, 1, "fp8"},
                             {"no_bias", "1f1b", 1, 2, "f32", false}};
    if (world().size() % 2 == 0) {
        all.push_back({"1f1b", "1f1b", 2, 4});
        all.push_back({"interleaved", "interleaved", 2, 2});
        all.push_back({"zb_v", "zb-v", 2, 4});
        all.push_back({"dualpipe", "dualpipe", 2, 4});
        all.push_back({"dualpipev", "dualpipev", 2, 4, "bf16"});
    }
    return all;
}

RunConfig config_of(const Case& c) {
    RunConfig run = small_run();
    run.model.layers = 5;
    run.model.router_bias = c.router_bias; // its loads are those of steps alone
    run.model.bias_update_rate = c.router_bias ? 0.1 : 0;
    run.model.balance_loss = BalanceLossKind::Global; // and so are its counts
    run.model.balance_loss_alpha = 0.1;
    run.train.batch = 16;
    run.train.lr = 1e-2;
    run.train.micro_batches = c.micro_batches;
    run.train.pipeline = parse_schedule_kind(c.pipeline);
    from_text(run.train.precision, c.precision);
    return run;
}

RunLayout layout_of(const Case& c) {
    const auto ranks = static_cast<std::uint32_t>(world().size());
    return {c.pp, ranks / c.pp, ranks / c.pp};
}

/// Losses of three steps, and all that they leave; with a look at held-out text around each.
struct Outcome {
    std::vector<double> losses, held_out;
    std::vector<std::vector<LayerLoads>> loads;
    std::vector<std::vector<float>> tensors;
};

Outcome run(Device& device, const Case& c, std::uint64_t held_out) {
    const RunConfig config = config_of(c);
    Trainer trainer(device, world(), config, layout_of(c));
    Outcome outcome;
    const auto look = [&] {
        if (held_out > 0)
            outcome.held_out.push_back(trainer.held_out_loss(fill_sequence, held_out));
    };
    look();
    for (std::uint64_t step = 0; step < 3; ++step) {
        const StepResult result = trainer.step(step, fill_sequence);
        outcome.losses.push_back(result.loss);
        outcome.loads.push_back(result.expert_loads);
        look();
    }
    device.wait_idle();
    for (const Parameter& parameter : trainer.parameters().all())
        if (!parameter.info.trainable()) // the routers' biases
            outcome.tensors.push_back(trainer.parameters().download(parameter.info.name));
    for (std::vector<float>& tensor : trained_tensors(trainer))
        outcome.tensors.push_back(std::move(tensor));
    device.wait_idle();
    return outcome;
}

TEST(Evaluation, LeavesTheTrainingsBitsAlone) {
    const auto device = testing::make_device();
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.name);
        const Outcome without = run(*device, c, 0), with = run(*device, c, 7);
        ALL_RANKS_TRUE(without.losses == with.losses);
        ALL_RANKS_TRUE(without.loads == with.loads);
        ALL_RANKS_TRUE(!without.tensors.empty() && without.tensors == with.tensors);
        ALL_RANKS_TRUE(with.held_out.size() == 4 && with.held_out[3] < with.held_out[0]);
    }
}

// Of each layer with experts, over the batch of all ranks, whoever holds it.
TEST(Evaluation, AStepTellsHowMuchExpertsWereChosen) {
    const auto device = testing::make_device();
    const std::vector<Case> all = cases();
    for (const Case& c : all) {
        SCOPED_TRACE(c.name);
        RunConfig config = config_of(c);
        const bool drops = &c == &all.front(); // with room for the mean of each expert alone
        config.model.capacity_factor = drops ? 1 : 0;
        config.model.capacity_of = CapacityOf::Expert;
        Trainer trainer(*device, world(), config, layout_of(c));
        for (std::uint64_t step = 0; step < 2; ++step) {
            const std::vector<LayerLoads> layers = trainer.step(step, fill_sequence).expert_loads;
            ALL_RANKS_TRUE(layers.size() == 4);
            for (std::size_t i = 0; i < layers.size(); ++i) {
                const std::vector<std::uint64_t>& loads = layers[i].loads;
                ALL_RANKS_TRUE(layers[i].layer == i + 1 && loads.size() == 4);
                ALL_RANKS_TRUE(std::accumulate(loads.begin(), loads.end(), std::uint64_t{0}) ==
                               config.train.batch * config.train.seq * config.model.top_k);
                ALL_RANKS_TRUE(layers[i].kept.has_value() == drops);
                ALL_RANKS_TRUE(!drops || (*layers[i].kept > 0 &&
                                          *layers[i].kept < config.train.batch * config.train.seq *
                                                                config.model.top_k));
            }
        }
    }
}

// Before a step, the same micro-batches' forwards: the step's own loss, bit by bit.
TEST(Evaluation, IsTheLossOfAStepOnTheSameSequences) {
    const auto device = testing::make_device();
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.name);
        Trainer trainer(*device, world(), config_of(c), layout_of(c));
        const double before = trainer.held_out_loss(fill_sequence, 16);
        ALL_RANKS_TRUE(before > 3 && trainer.step(0, fill_sequence).loss == before);
        ALL_RANKS_TRUE(trainer.held_out_loss(fill_sequence, 16) != before);
    }
}

// A capacity of one choice drops nothing without a gradient, and of no sequence that is spared.
TEST(Evaluation, DropsNothingAndNorDoesTrainingOfSparedSequences) {
    const auto device = testing::make_device();
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.name);
        RunConfig config = config_of(c);
        double expected = 0;
        {
            Trainer trainer(*device, world(), config, layout_of(c));
            expected = trainer.held_out_loss(fill_sequence, 16);
        }
        config.model.capacity_factor = 1e-6;
        config.model.capacity_of = CapacityOf::Expert;
        config.model.capacity_spares = 0.4;
        Trainer trainer(*device, world(), config, layout_of(c));
        ALL_RANKS_TRUE(trainer.held_out_loss(fill_sequence, 16) == expected);
        const std::uint64_t of_sequence = config.train.seq * config.model.top_k;
        // Where none is spared each expert takes one choice of a micro-batch.
        const std::uint64_t others = 4 * config.train.micro_batches * layout_of(c).dp;
        for (std::uint64_t step = 0; step < 3; ++step) {
            std::uint64_t spared = 0;
            for (std::uint64_t i = 0; i < config.train.batch; ++i)
                spared += config.model.spares(step * config.train.batch + i) ? 1 : 0;
            for (const LayerLoads& layer : trainer.step(step, fill_sequence).expert_loads)
                ALL_RANKS_TRUE(*layer.kept >= spared * of_sequence &&
                               *layer.kept <= spared * of_sequence + others);
        }
    }
}

// Any number of sequences: those that fill micro-batches up count nothing.
TEST(Evaluation, CountsEachSequenceOnce) {
    const auto device = testing::make_device();
    for (const Case& c : cases()) {
        SCOPED_TRACE(c.name);
        Trainer trainer(*device, world(), config_of(c), layout_of(c));
        const auto shifted = [](std::uint64_t by) {
            return [by](std::uint64_t step, std::uint64_t index, std::span<std::uint32_t> tokens) {
                fill_sequence(step, index + by, tokens);
            };
        };
        double sum = 0;
        for (std::uint64_t i = 0; i < 19; ++i)
            sum += trainer.held_out_loss(shifted(i), 1);
        const double all = trainer.held_out_loss(fill_sequence, 19);
        ALL_RANKS_TRUE(std::abs(all - sum / 19) <= 1e-6 * all);
        EXPECT_BELLOWS_ERROR(trainer.held_out_loss(fill_sequence, 0), InvalidArgument, "sequences");
    }
}

} // namespace
} // namespace bellows
