// SPDX-License-Identifier: MIT
// The f64 reference model: its gradients against finite differences in every parameter of several
// small models, and properties that a transformer must have.

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "support/model_parameters.hpp"
#include "verify/reference/model.hpp"
#include "verify/reference/optimizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace bellows::reference {
namespace {

ModelConfig small_config() {
    ModelConfig c;
    c.vocabulary = 16;
    c.hidden = 8;
    c.layers = 2;
    c.dense_layers = 1;
    c.heads = 2;
    c.q_lora_rank = 8;
    c.kv_lora_rank = 8;
    c.qk_nope_head_dim = 8;
    c.qk_rope_head_dim = 8;
    c.v_head_dim = 16;
    c.dense_ffn = 16;
    c.moe_ffn = 8;
    c.routed_experts = 4;
    c.shared_experts = 2;
    c.top_k = 2;
    c.n_group = 2;
    c.topk_group = 1;
    c.route_scale = 1.5;
    c.balance_loss_alpha = 0.05;
    c.norm_eps = 1e-3;
    return c;
}

ModelConfig softmax_config() {
    ModelConfig c = small_config();
    c.q_lora_rank = 0;
    c.score_function = ScoreFunction::Softmax;
    c.normalize_top_k = false;
    c.router_bias = false;
    c.bias_update_rate = 0;
    c.shared_experts = 0;
    c.tied_embeddings = true;
    return c;
}

/// Every trainable parameter has a gradient of its size; a sample of elements of each, and all
/// along one random direction, equal central differences of loss + balance loss.
void check_gradients(const ModelConfig& config, const Batch& batch) {
    Parameters p = test::random_parameters(config, 1);
    const ModelForward f = model_forward(config, p, batch);
    const ModelGrads grads = model_backward(config, p, batch, f);
    const auto loss = [&] {
        const ModelForward moved = model_forward(config, p, batch, &f.routing);
        double all = moved.loss + moved.balance_loss + moved.z_loss;
        for (const ModuleForward& module : moved.modules)
            all += 0.3 / static_cast<double>(config.mtp_depth) * module.loss;
        return all;
    };
    std::size_t trainable = 0;
    for (const ParameterInfo& info : parameters(config)) {
        if (!info.trainable()) {
            EXPECT_EQ(grads.parameters.count(info.name), 0u) << info.name;
            continue;
        }
        ++trainable;
        const Vector& g = grads.parameters.at(info.name);
        ASSERT_EQ(g.size(), info.size()) << info.name;
        Vector& values = p.at(info.name);
        for (std::size_t i = 0; i < g.size(); i += std::max<std::size_t>(1, g.size() / 7)) {
            const double start = values[i], step = 1e-5;
            values[i] = start + step;
            const double above = loss();
            values[i] = start - step;
            const double below = loss();
            values[i] = start;
            const double numeric = (above - below) / (2 * step);
            EXPECT_NEAR(g[i], numeric, 1e-8 + 1e-6 * std::abs(numeric)) << info.name << " " << i;
        }
        const Vector start = values;
        const Vector direction = test::to_double(test::random_f32(g.size(), trainable));
        const auto along = [&](const Vector& t) {
            for (std::size_t i = 0; i < start.size(); ++i)
                values[i] = start[i] + t[0] * direction[i];
            const double result = loss();
            values = start;
            return result;
        };
        const double numeric = test::numeric_gradient({0.0}, along)[0];
        EXPECT_NEAR(test::dot(g, direction), numeric, 1e-8 + 1e-6 * std::abs(numeric)) << info.name;
    }
    EXPECT_EQ(grads.parameters.size(), trainable);
}

void check_gradients(const ModelConfig& config) {
    check_gradients(config, test::random_batch(config, 2, 5, 99));
}

TEST(ReferenceModel, GradientsSigmoidLowRankQueriesGroupsSharedExperts) {
    check_gradients(small_config());
}

TEST(ReferenceModel, GradientsSoftmaxFullQueriesTiedEmbeddings) {
    check_gradients(softmax_config());
}

TEST(ReferenceModel, GradientsOfEveryRouterLoss) {
    for (ModelConfig c : {small_config(), softmax_config()})
        for (const BalanceLossKind kind : {BalanceLossKind::Expert, BalanceLossKind::Global}) {
            c.balance_loss = kind;
            c.device_loss_alpha = 0.3;
            c.communication_loss_alpha = 0.2;
            c.router_z_loss = 0.1;
            validate(c);
            check_gradients(c);
        }
}

TEST(ReferenceModel, GradientsWithDroppedChoices) {
    ModelConfig c = small_config();
    c.capacity_factor = 0.6;
    Batch batch = test::random_batch(c, 2, 5, 99);
    for (std::size_t i = 0; i < batch.tokens.size(); ++i) // whose scores are never equal
        batch.tokens[i] = static_cast<std::int32_t>(i * 3 % 16);
    check_gradients(c, batch);
    c.capacity_of = CapacityOf::Expert;
    check_gradients(c, batch);
    const Parameters p = test::random_parameters(c, 1);
    const ModelForward f = model_forward(c, p, batch);
    const std::vector<std::int32_t>& sent = f.layers[1].moe.tokens[0].sent;
    EXPECT_GE(std::count(sent.begin(), sent.end(), -1), 8) << "of 20, 4 experts take 3 each";
}

TEST(ReferenceModel, GradientsOfModulesThatPredictFurtherTokens) {
    for (ModelConfig c : {small_config(), softmax_config()}) {
        c.mtp_depth = c.tied_embeddings ? 1 : 2;
        Batch batch = test::random_batch(c, 2, 5, 99);
        for (std::size_t row = 0; row + 1 < batch.rows(); ++row) // the next token, as in training
            batch.targets[row] = batch.tokens[row + 1];
        batch.targets.back() = 3;
        check_gradients(c, batch);
        const ModelForward f = model_forward(c, test::random_parameters(c, 1), batch);
        EXPECT_EQ(f.modules[0].tokens, batch.targets);
        EXPECT_EQ(f.modules[0].targets[3], batch.targets[4]);
        EXPECT_EQ(f.modules[0].targets[4], -1) << "the end of the first sequence";
    }
}

TEST(ReferenceModel, GradientsDenseOnly) {
    ModelConfig c = small_config();
    c.dense_layers = c.layers;
    check_gradients(c);
}

TEST(ReferenceModel, GradientsStretchedRotationsLatentEpsGroupsByTheirBest) {
    ModelConfig c = small_config();
    c.latent_norm_eps = 0.1;
    c.rope_scaling = RopeScaling::Yarn;
    c.rope_factor = 4;
    c.rope_original_context = 2;
    c.rope_beta_fast = 1;
    c.rope_beta_slow = 0.1;
    c.rope_mscale = 2;
    c.rope_mscale_all_dim = 1;
    c.group_score = GroupScore::Max;
    check_gradients(c);
}

ModelConfig grouped_config() {
    ModelConfig c = softmax_config();
    c.attention = AttentionKind::Gqa;
    c.heads = 6;
    c.kv_heads = 2;
    c.head_dim = 8;
    c.kv_lora_rank = c.qk_nope_head_dim = c.qk_rope_head_dim = c.v_head_dim = 0;
    return c;
}

TEST(ReferenceModel, GradientsGroupedQueries) {
    ModelConfig c = grouped_config();
    c.rope_scaling = RopeScaling::Llama3;
    c.rope_factor = 8;
    c.rope_original_context = 4;
    check_gradients(c);
    c.dense_layers = c.layers;
    check_gradients(c);
}

TEST(ReferenceModel, GradientsGroupedQueriesWithNormsAndNoDenseLayer) {
    ModelConfig c = grouped_config();
    c.qk_norm = true;
    c.dense_layers = 0;
    check_gradients(c);
}

TEST(ReferenceModel, GradientsOfTheResidualStream) {
    // dhidden[i] must equal the change of the loss when the embedding's output moves.
    const ModelConfig c = small_config();
    Parameters p = test::random_parameters(c, 1);
    Batch batch = test::random_batch(c, 1, 4, 5);
    batch.tokens = {3, 1, 7, 2}; // distinct: a row of the table is one row of the stream
    const ModelForward f = model_forward(c, p, batch);
    const ModelGrads g = model_backward(c, p, batch, f);
    ASSERT_EQ(g.dhidden.size(), c.layers + 1);
    const Vector& table = g.parameters.at("model.embed_tokens.weight");
    for (std::size_t row = 0; row < 4; ++row) {
        for (std::size_t i = 0; i < c.hidden; ++i) {
            EXPECT_EQ(g.dhidden[0][row * c.hidden + i],
                      table[static_cast<std::size_t>(batch.tokens[row]) * c.hidden + i]);
        }
    }
}

TEST(ReferenceModel, StartsAtTheLossOfAUniformGuess) {
    const ModelConfig c = small_config();
    const Batch batch = test::random_batch(c, 3, 8, 4);
    const ModelForward f = model_forward(c, test::initial_parameters(c, 1), batch);
    EXPECT_NEAR(f.loss, std::log(16.0), 0.05);
    EXPECT_EQ(f.routing.size(), 1u);
    EXPECT_NEAR(f.balance_loss, 0.05, 0.02) << "alpha when balanced";
}

TEST(ReferenceModel, SeesNoFutureAndNoOtherSequence) {
    const ModelConfig c = small_config();
    const Parameters p = test::random_parameters(c, 1);
    Batch batch = test::random_batch(c, 2, 6, 3);
    const Vector before = model_forward(c, p, batch).logits;
    const std::size_t changed = 3; // in the first sequence
    batch.tokens[changed] = (batch.tokens[changed] + 1) % 16;
    const Vector after = model_forward(c, p, batch).logits;
    for (std::size_t row = 0; row < 12; ++row) {
        bool same = true;
        for (std::size_t i = 0; i < 16; ++i)
            same = same && before[row * 16 + i] == after[row * 16 + i];
        EXPECT_EQ(same, row < changed || row >= 6) << row;
    }
}

TEST(ReferenceModel, LossIsTheMeanOverTokensWithTargets) {
    const ModelConfig c = small_config();
    const Parameters p = test::random_parameters(c, 1);
    Batch batch = test::random_batch(c, 1, 5, 3);
    double sum = 0;
    const std::vector<std::int32_t> targets = batch.targets;
    for (std::size_t row = 0; row < 4; ++row) {
        batch.targets.assign(5, -1);
        batch.targets[row] = targets[row];
        sum += model_forward(c, p, batch).loss;
    }
    batch.targets = targets;
    EXPECT_NEAR(model_forward(c, p, batch).loss, sum / 4, 1e-13);
    batch.targets.assign(5, -1);
    EXPECT_EQ(model_forward(c, p, batch).loss, 0);
}

TEST(ReferenceModel, LearnsARepeatingText) {
    const ModelConfig c = small_config();
    Parameters p = test::initial_parameters(c, 1);
    Batch batch{1, 24, {}, {}};
    for (std::size_t i = 0; i < 24; ++i) {
        batch.tokens.push_back(static_cast<std::int32_t>(i % 6));
        batch.targets.push_back(static_cast<std::int32_t>((i + 1) % 6));
    }
    Parameters m, v;
    double loss = 0;
    for (std::uint64_t step = 1; step <= 60; ++step) {
        const ModelForward f = model_forward(c, p, batch);
        const ModelGrads g = model_backward(c, p, batch, f);
        loss = f.loss;
        for (const auto& [name, gradient] : g.parameters) {
            m[name].resize(gradient.size());
            v[name].resize(gradient.size());
            adamw_step(p[name], gradient, m[name], v[name], {.lr = 0.02, .weight_decay = 0}, step);
        }
        Vector& bias = p["model.layers.1.mlp.gate.e_score_correction_bias"];
        bias = updated_bias(bias, count_experts(f.routing.at(1), c.routed_experts),
                            c.bias_update_rate);
    }
    EXPECT_LT(loss, 0.05) << "from " << std::log(16.0);
}

} // namespace
} // namespace bellows::reference
