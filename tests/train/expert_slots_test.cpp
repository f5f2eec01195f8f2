// SPDX-License-Identifier: MIT
// Experts that training places in slots: whatever ranks compute them, they learn the same, bit by
// bit as long as each has one slot; a resumed run goes on as it was; EPLB evens out the ranks'
// rows.
#include "support/mpi_test.hpp"
#include "support/shared_folder.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"
#include "support/trained_tensors.hpp"
#include "train/expert_slots.hpp"

#include <bellows/shape/expert_placement.hpp>
#include <bellows/shape/groups.hpp>
#include <bellows/shape/stages.hpp>
#include <bellows/train/checkpoints.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

constexpr std::uint64_t kSteps = 3;
constexpr std::uint64_t kExperts = 8;

RunConfig run_in(const std::string& precision) {
    RunConfig run = small_run();
    run.model = wide_model();
    run.model.layers = 3;
    run.model.routed_experts = kExperts;
    run.train.batch = 8;
    run.train.lr = 1e-2;
    run.train.expert_sums = ExpertSums::PerChoice;
    from_text(run.train.precision, precision);
    return run;
}

RunLayout layout_of(std::uint32_t ep) {
    return {1, static_cast<std::uint32_t>(world().size()), ep};
}

/// All ranks share the experts; of four also two and two.
std::vector<std::uint32_t> shares() {
    const auto ranks = static_cast<std::uint32_t>(world().size());
    return ranks == 4 ? std::vector<std::uint32_t>{4, 2} : std::vector<std::uint32_t>{ranks};
}

/// The experts' slots are those of the plain placement, dealt out in another order.
ExpertPlaces turned(const RunConfig& config, std::uint32_t ep, std::uint64_t by) {
    ExpertPlaces places;
    for (std::uint64_t layer = config.model.dense_layers; layer < config.model.layers; ++layer) {
        ExpertPlacement placement = plain_placement(kExperts, ep);
        for (std::int32_t& expert : placement.expert_of_slot)
            if (expert != kFreeSlot)
                expert = static_cast<std::int32_t>(
                    (static_cast<std::uint64_t>(expert) * 3 + by + layer) % kExperts);
        places.placements[layer] = placement;
        places.loads[layer].assign(kExperts, 0);
    }
    return places;
}

/// A step's loss, and all that comes of it.
struct Outcome {
    double loss = 0, grad_norm = 0;
    std::vector<std::vector<float>> tensors;

    bool operator==(const Outcome&) const = default;
};

Outcome step_of(Trainer& trainer, Device& device, std::uint64_t step) {
    const StepResult result = trainer.step(step, fill_sequence);
    Outcome outcome{result.loss, result.grad_norm, trained_tensors(trainer)};
    device.wait_idle();
    return outcome;
}

class ExpertSlotsIn : public ::testing::TestWithParam<const char*> {
protected:
    const std::unique_ptr<Device> device_ = testing::make_device(testing::test_options());
};

TEST_P(ExpertSlotsIn, LearnTheSameWhereverTheyAre) {
    RunConfig config = run_in(GetParam());
    for (const std::uint32_t ep : shares()) {
        std::vector<Outcome> expected;
        {
            Trainer plain(*device_, world(), config, layout_of(ep));
            for (std::uint64_t step = 0; step < kSteps; ++step)
                expected.push_back(step_of(plain, *device_, step));
        }
        RunConfig slots = config;
        slots.train.eplb_slots = kExperts;
        Trainer placed(*device_, world(), slots, layout_of(ep));
        for (std::uint64_t step = 0; step < kSteps; ++step) {
            if (step > 0) // at first as without slots
                placed.resume_experts(turned(config, ep, step));
            ALL_RANKS_TRUE(step_of(placed, *device_, step) == expected[step]);
        }
    }
}

TEST_P(ExpertSlotsIn, LearnAlikeWithReplicas) {
    RunConfig config = run_in(GetParam());
    config.train.lr = 1e-3;
    const auto ep = static_cast<std::uint32_t>(world().size());
    Trainer plain(*device_, world(), config, layout_of(ep));
    config.train.eplb_slots = kExperts + 3;
    config.train.eplb_every = 1;
    Trainer placed(*device_, world(), config, layout_of(ep));
    const bool f32 = GetParam() == std::string("f32");
    const std::uint64_t steps = f32 && ep == 2 ? 50 : 2 * kSteps;
    for (std::uint64_t step = 0; step < steps; ++step) {
        const StepResult a = plain.step(step, fill_sequence), b = placed.step(step, fill_sequence);
        device_->wait_idle();
        const double near = f32 ? (step == 0 ? 1e-5 : 1e-3) : 2e-2;
        ALL_RANKS_TRUE(std::abs(a.loss - b.loss) <= near * a.loss);
    }
}

TEST_P(ExpertSlotsIn, GoOnFromACheckpointBitByBit) {
    const SharedFolder folder;
    SavedRun saved;
    saved.config = run_in(GetParam());
    saved.config.train.eplb_slots = kExperts + 2;
    saved.config.train.eplb_every = 2;
    saved.layout = layout_of(static_cast<std::uint32_t>(world().size()));
    saved.out = folder.path();
    Outcome expected;
    ExpertPlaces places;
    {
        Trainer trainer(*device_, world(), saved.config, saved.layout);
        for (std::uint64_t step = 0; step < 5; ++step) {
            expected = step_of(trainer, *device_, step);
            if (step == 2) // one behind a placement
                save_checkpoint(saved.out, {{kConfigFile, saved.config_text()}}, trainer, world(),
                                step + 1);
        }
        places = trainer.expert_places();
    }
    const Checkpoint checkpoint = Checkpoint::open(saved.out);
    Trainer trainer(*device_, world(), saved.config, saved.layout);
    load_checkpoint(checkpoint, trainer, world());
    step_of(trainer, *device_, 3);
    ALL_RANKS_TRUE(step_of(trainer, *device_, 4) == expected);
    ALL_RANKS_TRUE(trainer.expert_places() == places);
    // With other slots the experts are placed by the loads that were saved.
    saved.config.train.eplb_slots = 2 * kExperts;
    Trainer other(*device_, world(), saved.config, saved.layout);
    load_checkpoint(checkpoint, other, world());
    ALL_RANKS_TRUE(std::isfinite(other.step(3, fill_sequence).loss));
    world().control().barrier(std::chrono::seconds(60)); // before the folder goes
}

INSTANTIATE_TEST_SUITE_P(Precisions, ExpertSlotsIn, ::testing::Values("f32", "bf16", "fp8"),
                         [](const auto& of) { return std::string(of.param); });

// Without a trainer: what the slots hold, and what travels for it.
TEST(ExpertSlotsOf, APlacementTravelsWithNoMoreThanAStepsWeights) {
    const std::unique_ptr<Device> device = testing::make_device(testing::test_options());
    const RunConfig config = run_in("f32");
    const auto ep = static_cast<std::uint32_t>(world().size());
    const RunLayout layout = layout_of(ep);
    const Schedule schedule = pipeline_schedule(config.model, config.train, layout);
    const auto position = static_cast<std::uint64_t>(world().rank());
    const std::uint64_t slots_of_rank = (kExperts + ep - 1) / ep;
    const auto transport = open_transport(world()), exchange_transport = open_transport(world());
    HostThread thread(*device, "network");
    Collectives ranks(*device, world(), *transport, thread, Group::all(world().size()));
    TrainingShape shape = config.train;
    shape.eplb_slots = kExperts;
    ExpertExchange exchange(*device, world(), *exchange_transport, thread,
                            exchange_config(config.model, shape, layout, 0, position, 8));
    ParameterStore home(*device, parameters_of_rank(config.model, schedule, 0, position, ep),
                        DType::F32),
        stored(*device, slot_parameters(config.model, schedule, 0, position, slots_of_rank),
               DType::F32);
    home.initialise(5);
    ExpertSlots slots(
        home, stored, ranks, exchange,
        {.model = config.model, .slots_of_rank = slots_of_rank, .limit = std::chrono::seconds(60)});
    // Initial values follow names: any rank knows those of any expert.
    const auto holds = [&](std::uint64_t layer) {
        bool good = true;
        const auto mine = slots.placement(layer).of_rank(position);
        for (const char* matrix : {"gate_up_proj", "down_proj"})
            for (std::uint64_t slot = 0; slot < slots_of_rank; ++slot) {
                if (mine[slot] == kFreeSlot)
                    continue;
                const std::string base = "model.layers." + std::to_string(layer) + ".mlp.experts.",
                                  end = "." + std::string(matrix) + ".weight";
                for (const ParameterInfo& info : parameters(config.model))
                    if (info.name == base + std::to_string(mine[slot]) + end)
                        good = good && stored.download(
                                           base + std::to_string(position * slots_of_rank + slot) +
                                           end) == initial_values(info, 5);
            }
        return good;
    };
    const auto sent = [&] {
        device->wait_idle();
        return ranks.stats().bytes_sent;
    };
    slots.spread_weights();
    ALL_RANKS_TRUE(sent() == 0); // all are at home
    ALL_RANKS_TRUE(holds(1) && holds(2));
    const ExpertPlaces places = turned(config, ep, 1);
    slots.place(places.placements);
    const std::uint64_t of_move = sent();
    ALL_RANKS_TRUE(holds(1) && holds(2));
    slots.spread_weights();
    const std::uint64_t of_step = sent() - of_move;
    ALL_RANKS_TRUE(of_move <= of_step);
    ALL_RANKS_TRUE(ep == 1 || of_step > 0 || position > 0);
    ALL_RANKS_TRUE(holds(1) && holds(2));
    slots.place(places.placements); // nothing moves
    ALL_RANKS_TRUE(sent() == of_move + of_step);
}

double most_over_mean(const StepResult& result) {
    double most = 0;
    for (const LayerLoads& layer : result.expert_loads)
        most = std::max(most, max_over_mean(layer.rank_loads));
    return most;
}

// A router whose bias sends all tokens to two experts of the first rank.
TEST(ExpertBalancing, EvensOutTheRanks) {
    if (world().size() < 2)
        GTEST_SKIP() << "needs ranks to share the experts";
    const std::unique_ptr<Device> device = testing::make_device(testing::test_options());
    RunConfig config = small_run();
    config.model.routed_experts = 32;
    config.model.bias_update_rate = 0;
    config.train.batch = 16;
    config.train.eplb_slots = 40;
    config.train.eplb_every = 2;
    const auto ranks = static_cast<double>(world().size());
    Trainer trainer(*device, world(), config,
                    layout_of(static_cast<std::uint32_t>(world().size())));
    std::vector<float> bias(32, 0.0f);
    bias[0] = bias[1] = 2;
    trainer.parameters().upload("model.layers.1.mlp.gate.e_score_correction_bias", bias);
    std::vector<double> seen;
    std::size_t moved = 0;
    for (std::uint64_t step = 0; step < 4; ++step) {
        const StepResult result = trainer.step(step, fill_sequence);
        seen.push_back(most_over_mean(result));
        moved += result.moved_experts.size();
    }
    device->wait_idle();
    ALL_RANKS_TRUE(seen[0] > 0.75 * ranks && seen[1] > 0.75 * ranks);
    ALL_RANKS_TRUE(seen[2] <= 1.25 && seen[3] <= 1.25);
    ALL_RANKS_TRUE(moved > 0);
}

} // namespace
} // namespace bellows
