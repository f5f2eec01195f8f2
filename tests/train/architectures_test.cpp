// SPDX-License-Identifier: MIT
// Every architecture trains: the first step's loss, norm and gradients against the f64 reference,
// losses in bf16 and FP8 beside it, and the same losses bit for bit in every schedule.
#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/model_parameters.hpp"
#include "support/mpi_test.hpp"
#include "support/small_run.hpp"
#include "support/test_device.hpp"
#include "verify/reference/model.hpp"

#include <bellows/train/trainer.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::world;

constexpr std::uint64_t kSteps = 3;

ModelConfig base() {
    ModelConfig m = small_run().model;
    m.layers = 5;
    m.dense_ffn = 56;
    m.moe_ffn = 24;
    m.routed_experts = 8;
    m.init_std = 0.15;
    return m;
}

ModelConfig grouped() {
    ModelConfig m = base();
    m.attention = AttentionKind::Gqa;
    m.heads = 4;
    m.kv_heads = 2;
    m.head_dim = 16;
    m.kv_lora_rank = m.qk_nope_head_dim = m.qk_rope_head_dim = m.v_head_dim = 0;
    return m;
}

ModelConfig llama() {
    ModelConfig m = grouped();
    m.dense_layers = m.layers;
    m.rope_scaling = RopeScaling::Llama3;
    m.rope_factor = 8;
    m.rope_original_context = 8;
    m.tied_embeddings = true;
    return m;
}

ModelConfig qwen3() {
    ModelConfig m = grouped();
    m.dense_layers = m.layers;
    m.qk_norm = true;
    m.rope_theta = 1e6;
    return m;
}

ModelConfig qwen3_moe() {
    ModelConfig m = qwen3();
    m.dense_layers = 0;
    m.score_function = ScoreFunction::Softmax;
    m.router_bias = false;
    m.bias_update_rate = 0;
    m.balance_loss_alpha = 0.1;
    return m;
}

ModelConfig deepseek_v2() {
    ModelConfig m = base();
    m.rope_scaling = RopeScaling::Yarn;
    m.rope_factor = 40;
    m.rope_original_context = 8;
    m.rope_mscale = m.rope_mscale_all_dim = 0.707;
    m.shared_experts = 2;
    m.score_function = ScoreFunction::Softmax;
    m.n_group = 4;
    m.topk_group = 2;
    m.group_score = GroupScore::Max;
    m.normalize_top_k = false;
    m.route_scale = 4;
    m.router_bias = false;
    m.bias_update_rate = 0;
    m.balance_loss = BalanceLossKind::Expert;
    m.balance_loss_alpha = 0.1;
    m.device_loss_alpha = 0.3;
    m.communication_loss_alpha = 0.2;
    m.router_z_loss = 0.05;
    return m;
}

ModelConfig moonlight() {
    ModelConfig m = base();
    m.norm_eps = 1e-3;
    m.latent_norm_eps = 1e-6;
    m.rope_theta = 5e4;
    m.shared_experts = 1;
    m.route_scale = 2.446;
    m.bias_update_rate = 0.01;
    m.balance_loss_alpha = 0.1;
    return m;
}

ModelConfig tied_experts() {
    ModelConfig m = moonlight();
    m.tied_embeddings = true;
    m.q_lora_rank = 16;
    return m;
}

/// Modules of multi-token prediction, which have experts as the last layers do.
ModelConfig predicting() {
    ModelConfig m = moonlight();
    m.layers = 4;
    m.mtp_depth = 1;
    return m;
}

/// Two modules of a model without experts, whose head is the embedding.
ModelConfig predicting_twice() {
    ModelConfig m = llama();
    m.layers = m.dense_layers = 4;
    m.mtp_depth = 2;
    return m;
}

struct Architecture {
    const char* name;
    ModelConfig (*config)();
};

class Architectures : public ::testing::TestWithParam<Architecture> {};

RunConfig run_of(const ModelConfig& model, ScheduleKind kind = ScheduleKind::OneFOneB,
                 std::uint64_t micro_batches = 4) {
    RunConfig run;
    run.model = model;
    run.train.batch = 8;
    run.train.seq = 12;
    run.train.micro_batches = micro_batches;
    run.train.pipeline = kind;
    run.train.lr = 1e-2;
    run.train.clip_norm = 0; // the norm's rounding differs with the ranks
    return run;
}

RunLayout stages() {
    const auto pp = static_cast<std::uint32_t>(world().size());
    return {pp, 1, 1};
}

struct Outcome {
    std::vector<double> losses;
    std::vector<double> of_modules; ///< the first step's
    double norm = 0;                ///< of the first step's gradient
    std::map<std::string, std::vector<float>> gradients;
};

Outcome train(const RunConfig& run, const RunLayout& layout, std::uint64_t steps = kSteps) {
    const auto device = testing::make_device(testing::test_options());
    Trainer trainer(*device, world(), run, layout);
    Outcome outcome;
    for (std::uint64_t step = 0; step < steps; ++step) {
        const StepResult result = trainer.step(step, fill_sequence);
        outcome.losses.push_back(result.loss);
        if (step > 0)
            continue;
        outcome.norm = result.grad_norm;
        outcome.of_modules = result.mtp_losses;
        trainer.gather(Parted::Gradients);
        for (const Parameter& parameter : trainer.parameters().all())
            if (parameter.info.trainable())
                outcome.gradients[parameter.info.name] =
                    trainer.parameters().download_gradient(parameter.info.name);
    }
    device->wait_idle();
    return outcome;
}

struct Expected {
    double loss = 0, norm = 0;
    std::vector<double> of_modules;
    reference::Parameters gradients;
};

Expected expected_of(const RunConfig& run) {
    const reference::Parameters weights = test::initial_parameters(run.model, run.train.seed);
    reference::Batch batch{run.train.batch, run.train.seq, {}, {}};
    std::vector<std::uint32_t> line(run.train.seq + 1);
    for (std::uint64_t i = 0; i < run.train.batch; ++i) {
        fill_sequence(0, i, line);
        batch.tokens.insert(batch.tokens.end(), line.begin(), line.end() - 1);
        batch.targets.insert(batch.targets.end(), line.begin() + 1, line.end());
    }
    const auto forward = reference::model_forward(run.model, weights, batch);
    std::vector<double> of_modules;
    for (const auto& module : forward.modules)
        of_modules.push_back(module.loss);
    Expected expected{forward.loss, 0, of_modules,
                      reference::model_backward(run.model, weights, batch, forward).parameters};
    for (const auto& [name, gradient] : expected.gradients)
        expected.norm += test::dot(gradient, gradient);
    expected.norm = std::sqrt(expected.norm);
    return expected;
}

void expect_reference(const Outcome& outcome, const Expected& expected) {
    EXPECT_NEAR(outcome.losses[0], expected.loss, 2e-6 * expected.loss);
    ASSERT_EQ(outcome.of_modules.size(), expected.of_modules.size());
    for (std::size_t k = 0; k < expected.of_modules.size(); ++k)
        EXPECT_NEAR(outcome.of_modules[k], expected.of_modules[k], 2e-6 * expected.of_modules[k]);
    EXPECT_NEAR(outcome.norm, expected.norm, 1e-5 * expected.norm);
    for (const auto& [name, gradient] : outcome.gradients) {
        const reference::Vector& truth = expected.gradients.at(name);
        double largest = 1e-9;
        for (const double value : truth)
            largest = std::max(largest, std::abs(value));
        EXPECT_TRUE(test::elements_match(gradient, truth, {}, test::within(5e-5 * largest, 0)))
            << name;
        EXPECT_LE(test::calc_diff(gradient, truth), 2e-10) << name;
    }
}

TEST_P(Architectures, MatchesTheReference) {
    RunConfig run = run_of(GetParam().config());
    const Expected expected = expected_of(run);
    const Outcome f32 = train(run, stages());
    expect_reference(f32, expected);
    run.train.precision = Precision::BF16;
    const Outcome bf16 = train(run, stages());
    EXPECT_NEAR(bf16.losses[0], expected.loss, 1e-2 * expected.loss);
    run.train.precision = Precision::FP8;
    const Outcome fp8 = train(run, stages());
    EXPECT_NE(fp8.losses, bf16.losses) << "FP8 rounds otherwise";
    for (std::uint64_t step = 0; step < kSteps; ++step)
        EXPECT_NEAR(fp8.losses[step], bf16.losses[step], 0.06 * bf16.losses[step]) << step;
}

TEST_P(Architectures, TrainsInEverySchedule) {
    if (world().size() == 1)
        return;
    const ModelConfig model = GetParam().config();
    const Expected expected = expected_of(run_of(model));
    const Outcome plain = train(run_of(model), stages());
    std::vector<ScheduleKind> kinds = {ScheduleKind::Interleaved, ScheduleKind::ZbV};
    if (model.mtp_depth > 1 || model.dense_layers == 0) // what ends or ranks might get wrong
        kinds.insert(kinds.end(), {ScheduleKind::GPipe, ScheduleKind::ZbH1, ScheduleKind::ZbH2,
                                   ScheduleKind::DualPipeV});
    for (const ScheduleKind kind : kinds) {
        SCOPED_TRACE(to_string(kind));
        const Outcome outcome = train(run_of(model, kind), stages());
        EXPECT_EQ(outcome.losses, plain.losses);
        expect_reference(outcome, expected);
    }
    // Two halves, which two ranks with all stages sum up, too.
    const Outcome halves = train(run_of(model, ScheduleKind::OneFOneB, 2), {1, 2, 1});
    expect_reference(halves, expected);
    const Outcome both_ways = train(run_of(model, ScheduleKind::DualPipe), stages());
    EXPECT_EQ(both_ways.losses, halves.losses);
    expect_reference(both_ways, expected);
}

RunConfig run_of_balance(BalanceLossKind kind, std::uint64_t micro_batches) {
    RunConfig run = run_of(qwen3_moe(), ScheduleKind::OneFOneB, micro_batches);
    run.model.layers = 2;
    run.model.balance_loss = kind;
    run.model.balance_loss_alpha = 1;
    return run;
}

TEST(BalanceLoss, CountsOfTheStepBeginWithItsFirstMicroBatch) {
    const RunLayout layout{1, static_cast<std::uint32_t>(world().size()), 1};
    const auto losses = [&](BalanceLossKind kind, std::uint64_t micro_batches) {
        return train(run_of_balance(kind, micro_batches), layout).losses;
    };
    const auto ones = losses(BalanceLossKind::Global, 1);
    EXPECT_EQ(ones, losses(BalanceLossKind::MicroBatch, 1));
    EXPECT_NE(losses(BalanceLossKind::Global, 4), losses(BalanceLossKind::MicroBatch, 4));
}

TEST(BalanceLoss, BiasesMoveForAsManySteps) {
    RunConfig run = run_of(moonlight());
    run.model.layers = 2;
    const auto biases = [&](std::uint64_t steps, std::uint64_t updates) {
        run.model.bias_update_steps = updates;
        const auto device = testing::make_device(testing::test_options());
        Trainer trainer(*device, world(), run, stages());
        for (std::uint64_t step = 0; step < steps; ++step)
            trainer.step(step, fill_sequence);
        device->wait_idle();
        std::vector<float> values;
        for (const Parameter& parameter : trainer.parameters().all())
            if (parameter.info.kind == ParameterKind::RouterBias)
                for (const float value : trainer.parameters().download(parameter.info.name))
                    values.push_back(value);
        return values;
    };
    const auto always = biases(3, 0), once = biases(1, 0);
    EXPECT_EQ(biases(3, 3), always);
    EXPECT_EQ(biases(3, 1), once);
    EXPECT_TRUE(always.empty() || always != once); // a stage without experts has none
}

INSTANTIATE_TEST_SUITE_P(Kinds, Architectures,
                         ::testing::Values(Architecture{"llama", llama},
                                           Architecture{"qwen3", qwen3},
                                           Architecture{"qwen3_moe", qwen3_moe},
                                           Architecture{"deepseek_v2", deepseek_v2},
                                           Architecture{"moonlight", moonlight},
                                           Architecture{"tied_experts", tied_experts},
                                           Architecture{"predicting", predicting},
                                           Architecture{"predicting_twice", predicting_twice}),
                         [](const auto& of) { return std::string(of.param.name); });

} // namespace
} // namespace bellows
