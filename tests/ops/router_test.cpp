// SPDX-License-Identifier: MIT
// Router ops against the f64 reference: scores, choice, weights, gradient, counts, bias.

#include "reference/router.hpp"
#include "support/op_test.hpp"

#include <bellows/kernels/kernels.hpp>

#include <cmath>

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct RouterCase {
    const char* name;
    std::uint64_t tokens, experts, top_k;
    std::uint32_t groups, group_top_k;
    bool softmax, normalise, bias;
    double scale;
};

const RouterCase kRouterCases[] = {
    {"one_token", 1, 4, 1, 1, 1, false, true, false, 1},
    {"all_chosen", 7, 5, 5, 1, 1, false, true, true, 1},
    {"odd", 33, 13, 3, 1, 1, false, false, true, 0.5},
    {"v2_lite", 130, 64, 6, 1, 1, true, false, false, 1},
    {"v2_groups", 65, 40, 6, 8, 3, true, false, false, 16},
    {"v3", 100, 256, 8, 8, 4, false, true, true, 2.5},
    {"groups_of_one", 9, 12, 4, 12, 5, true, true, false, 1},
    {"sigmoid_groups_of_one", 9, 12, 4, 12, 5, false, true, true, 1},
    {"softmax_normalised", 50, 31, 4, 1, 1, true, true, true, 1},
};

class OpsRouter : public testing::OpTest, public ::testing::WithParamInterface<RouterCase> {
protected:
    static ops::RouterOptions options(const RouterCase& c) {
        return {.score = c.softmax ? ops::RouterOptions::Score::Softmax
                                   : ops::RouterOptions::Score::Sigmoid,
                .groups = c.groups,
                .group_top_k = c.group_top_k,
                .group_score_top = c.softmax ? 1u : 2u,
                .normalise = c.normalise,
                .route_scale = static_cast<float>(c.scale)};
    }
    static reference::RouterShape shape(const RouterCase& c) {
        return {.experts = c.experts,
                .top_k = c.top_k,
                .n_group = c.groups,
                .topk_group = c.group_top_k,
                .score = c.softmax ? ScoreFunction::Softmax : ScoreFunction::Sigmoid,
                .normalize = c.normalise,
                .scale = c.scale};
    }
    void compare_forms(const RouterCase& c, std::uint32_t balance);
};

TEST_P(OpsRouter, ForwardAndGradientMatchTheReference) {
    const RouterCase c = GetParam();
    const auto logits = test::random_f32(c.tokens * c.experts, 1, -4, 4);
    const auto bias = test::random_f32(c.experts, 2, -0.1, 0.1);
    const auto d_weights = test::random_f32(c.tokens * c.top_k, 3);
    const OpTensor logits_t = tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor bias_t = tensor(DType::F32, {c.experts}, bias);
    const OpTensor d_weights_t = tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = result(DType::F32, {c.tokens, c.top_k});
    const OpTensor d_logits = result(DType::F32, {c.tokens, c.experts});
    run([&](Recording& recording) {
        ops::router_forward(recording, logits_t, c.bias ? bias_t.view : TensorView{}, scores, ids,
                            weights, options(c));
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options(c));
    });

    const reference::RouterShape shape = this->shape(c);
    const auto expected_bias = c.bias ? to_double(bias) : reference::Vector{};
    const auto expected_scores = reference::router_scores(to_double(logits), shape);
    // exp to 2 ulp, a sum of `experts` terms, one division.
    const double ulps = 8 + static_cast<double>(c.experts);
    EXPECT_TRUE(elements_match(read(scores), expected_scores, {c.tokens, c.experts},
                               storage_bound(DType::F32, ulps)));

    // Tokens whose choice hangs on less than the scores' error may choose otherwise.
    const auto actual_ids = read<std::int32_t>(ids);
    const auto expected_ids = reference::router_select(expected_scores, expected_bias, shape);
    const auto margins = reference::router_margins(expected_scores, expected_bias, shape);
    std::size_t decided = 0;
    for (std::size_t token = 0; token < c.tokens; ++token) {
        if (margins[token] < 1e-5) {
            continue;
        }
        ++decided;
        for (std::size_t k = 0; k < c.top_k; ++k) {
            EXPECT_EQ(actual_ids[token * c.top_k + k], expected_ids[token * c.top_k + k])
                << "token " << token << " place " << k;
        }
    }
    EXPECT_GE(10 * decided, 9 * c.tokens);
    // From here on with the choice as it was made.
    EXPECT_TRUE(elements_match(read(weights),
                               reference::router_weights(expected_scores, actual_ids, shape),
                               {c.tokens, c.top_k}, storage_bound(DType::F32, 2 * ulps)));
    const auto expected_gradient =
        reference::router_input_grad(to_double(d_weights), {}, expected_scores, actual_ids, shape);
    // Differences of terms up to scale * |dw| * s / sum: an absolute bound.
    const double magnitude = c.scale * (c.normalise ? 2 : 1);
    EXPECT_TRUE(elements_match(read(d_logits), expected_gradient, {c.tokens, c.experts},
                               storage_bound(DType::F32, 2 * ulps, magnitude)));
    if (!(c.normalise && c.top_k == 1)) { // there it is 0 but for rounding
        EXPECT_LE(test::calc_diff(read(d_logits), expected_gradient), 1e-9);
    }
}

/// Runs of equal length that the case's tokens make: more than one where they can.
std::uint64_t sequences_of(const RouterCase& c) {
    for (std::uint64_t divisor = 2; divisor < c.tokens; ++divisor)
        if (c.tokens % divisor == 0)
            return divisor;
    return 1;
}

TEST_P(OpsRouter, BalanceLossAddsItsGradient) {
    const RouterCase c = GetParam();
    const std::uint64_t sequences = sequences_of(c), length = c.tokens / sequences;
    const auto logits = test::random_f32(c.tokens * c.experts, 1, -4, 4);
    const auto d_weights = test::random_f32(c.tokens * c.top_k, 3);
    const OpTensor logits_t = tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor d_weights_t = tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = result(DType::F32, {c.tokens, c.top_k});
    const OpTensor counts = result(DType::U32, {sequences, c.experts});
    const OpTensor d_logits = result(DType::F32, {c.tokens, c.experts});
    const OpTensor without = result(DType::F32, {c.tokens, c.experts});
    const OpTensor plain = result(DType::F32, {c.tokens, c.experts});
    // Of the size of the gradient that comes through the weights.
    const double alpha = 2.0 * static_cast<double>(c.tokens);
    const double weight =
        alpha * static_cast<double>(c.experts) / static_cast<double>(c.top_k * length * c.tokens);
    run([&](Recording& recording) {
        ops::router_forward(recording, logits_t, {}, scores, ids, weights, options(c));
        ops::expert_counts(recording, ids, counts, false);
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options(c),
                          {counts, static_cast<float>(weight)});
        ops::router_dgrad(recording, d_weights_t, ids, scores, without, options(c), {counts, 0});
        ops::router_dgrad(recording, d_weights_t, ids, scores, plain, options(c));
    });
    EXPECT_EQ(read(without), read(plain)) << "a weight of 0 is no balance loss";

    const reference::RouterShape shape = this->shape(c);
    const auto chosen = read<std::int32_t>(ids);
    const auto expected_scores = reference::router_scores(to_double(logits), shape);
    const auto actual_counts = read<std::uint64_t>(counts);
    for (std::uint64_t s = 0; s < sequences; ++s) {
        const auto of_sequence = std::span(chosen).subspan(s * length * c.top_k, length * c.top_k);
        const auto expected_counts = reference::count_experts(of_sequence, c.experts);
        for (std::uint64_t e = 0; e < c.experts; ++e)
            ASSERT_EQ(actual_counts[s * c.experts + e], expected_counts[e])
                << "sequence " << s << " expert " << e;
    }
    const auto balance =
        reference::balance_loss(expected_scores, chosen, shape, sequences, sequences, alpha);
    const auto expected = reference::router_input_grad(to_double(d_weights), balance.dscores,
                                                       expected_scores, chosen, shape);
    double largest = c.scale * (c.normalise ? 2 : 1);
    for (const double value : balance.dscores)
        largest = std::max(largest, std::abs(value));
    const double ulps = 8 + static_cast<double>(c.experts);
    EXPECT_TRUE(elements_match(read(d_logits), expected, {c.tokens, c.experts},
                               storage_bound(DType::F32, 4 * ulps, largest)));
    if (c.top_k == c.experts) { // all are loaded alike: nothing to balance
        EXPECT_LE(test::calc_diff(read(d_logits), to_double(read(plain))), 1e-9);
        return;
    }
    EXPECT_LE(test::calc_diff(read(d_logits), expected), 1e-9);
    EXPECT_GT(test::calc_diff(read(plain), expected), 1e-3) << "the balance must show";
}

/// The kernels have two forms, of which the ops take one per device; this runs both, with and
/// without the balance loss.
TEST_P(OpsRouter, BothFormsOfTheKernelsAgree) {
    for (const std::uint32_t balance : {0u, 1u})
        compare_forms(GetParam(), balance);
}

void OpsRouter::compare_forms(const RouterCase& c, std::uint32_t balance) {
    const std::uint64_t sequences = sequences_of(c);
    std::vector<std::uint32_t> loads(sequences * c.experts);
    for (std::size_t i = 0; i < loads.size(); ++i)
        loads[i] = static_cast<std::uint32_t>(i * 7 % 11);
    const OpTensor counts = tensor(DType::U32, {sequences, c.experts}, loads);
    const OpTensor logits =
        tensor(DType::F32, {c.tokens, c.experts}, test::random_f32(c.tokens * c.experts, 4, -4, 4));
    const OpTensor bias =
        tensor(DType::F32, {c.experts}, test::random_f32(c.experts, 5, -0.1, 0.1));
    const OpTensor d_weights =
        tensor(DType::F32, {c.tokens, c.top_k}, test::random_f32(c.tokens * c.top_k, 6));
    std::vector<float> weights[2], d_logits[2];
    std::vector<std::int32_t> ids[2];
    for (const std::uint32_t by_workgroup : {0u, 1u}) {
        const OpTensor scores = result(DType::F32, {c.tokens, c.experts});
        const OpTensor ids_t = result(DType::I32, {c.tokens, c.top_k});
        const OpTensor weights_t = result(DType::F32, {c.tokens, c.top_k});
        const OpTensor d_logits_t = result(DType::F32, {c.tokens, c.experts});
        const auto word = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
        const std::uint32_t softmax = c.softmax ? 1 : 0, normalise = c.normalise ? 1 : 0;
        run([&](Recording& recording) {
            recording.dispatch(
                kernels::RouterForward{
                    .constants = {.local_size = 32,
                                  .row_per_workgroup = by_workgroup,
                                  .shared_experts = by_workgroup != 0 ? word(c.experts) : 1},
                    .logits = logits.view.buffer,
                    .bias = bias.view.buffer,
                    .scores = scores.view.buffer,
                    .topk_ids = ids_t.view.buffer,
                    .topk_weights = weights_t.view.buffer,
                    .tokens = word(c.tokens),
                    .experts = word(c.experts),
                    .top_k = word(c.top_k),
                    .groups = c.groups,
                    .group_top_k = c.group_top_k,
                    .group_score_top = 2,
                    .use_softmax = softmax,
                    .normalise = normalise,
                    .has_bias = 1,
                    .route_scale = static_cast<float>(c.scale)},
                {.x = 5}); // fewer workgroups than tokens: they loop
            recording.dispatch(kernels::RouterDgrad{.constants = {.local_size = 32,
                                                                  .row_per_workgroup = by_workgroup,
                                                                  .balance = balance},
                                                    .d_topk_weights = d_weights.view.buffer,
                                                    .topk_ids = ids_t.view.buffer,
                                                    .scores = scores.view.buffer,
                                                    .counts = counts.view.buffer,
                                                    .d_logits = d_logits_t.view.buffer,
                                                    .tokens = word(c.tokens),
                                                    .experts = word(c.experts),
                                                    .top_k = word(c.top_k),
                                                    .use_softmax = softmax,
                                                    .normalise = normalise,
                                                    .route_scale = static_cast<float>(c.scale),
                                                    .run_tokens = word(c.tokens / sequences),
                                                    .balance_weight = 0.25f},
                               {.x = 5});
        });
        ids[by_workgroup] = read<std::int32_t>(ids_t);
        weights[by_workgroup] = read(weights_t);
        d_logits[by_workgroup] = read(d_logits_t);
    }
    EXPECT_EQ(ids[0], ids[1]);
    if (!c.softmax) { // whose sum has another order
        EXPECT_EQ(weights[0], weights[1]);
        if (balance == 0) { // likewise
            EXPECT_EQ(d_logits[0], d_logits[1]);
        }
    }
    const double ulps = 8 + static_cast<double>(c.experts);
    EXPECT_TRUE(elements_match(weights[1], to_double(weights[0]), {c.tokens, c.top_k},
                               storage_bound(DType::F32, 2 * ulps)));
    EXPECT_TRUE(elements_match(d_logits[1], to_double(d_logits[0]), {c.tokens, c.experts},
                               storage_bound(DType::F32, 2 * ulps, 2 * c.scale + balance * 3)));
}

INSTANTIATE_TEST_SUITE_P(Table, OpsRouter, ::testing::ValuesIn(kRouterCases),
                         [](const auto& test) { return std::string(test.param.name); });

class OpsRouterRules : public testing::OpTest {};

TEST_F(OpsRouterRules, TiesGoToTheLowerExpertAndNanIsNeverPreferred) {
    const float nan = std::nanf("");
    const OpTensor logits = tensor(DType::F32, {3, 6},
                                   std::vector<float>{1, 2, 2, 2, 1, 2, //
                                                      0, 0, 0, 0, 0, 0, //
                                                      nan, 1, nan, 0, nan, 2});
    const OpTensor scores = result(DType::F32, {3, 6});
    const OpTensor ids = result(DType::I32, {3, 4});
    const OpTensor weights = result(DType::F32, {3, 4});
    run([&](Recording& recording) {
        ops::router_forward(recording, logits, {}, scores, ids, weights, {.normalise = false});
    });
    EXPECT_EQ(read<int>(ids), (std::vector<int>{1, 2, 3, 5, 0, 1, 2, 3, 5, 1, 3, 0}));
}

TEST_F(OpsRouterRules, CountsAddUpAndIgnoreAbsentExperts) {
    const std::vector<std::int32_t> ids{0, 2, -1, 2, 7, 2, 1, -1, 0, 100};
    const OpTensor ids_t = tensor(DType::I32, {5, 2}, ids);
    const OpTensor counts = result(DType::U32, {8});
    run([&](Recording& recording) {
        ops::expert_counts(recording, ids_t, counts, false);
        ops::expert_counts(recording, ids_t, counts, true);
    });
    EXPECT_EQ(read<int>(counts), (std::vector<int>{4, 2, 6, 0, 0, 0, 0, 2}));
}

TEST_F(OpsRouterRules, BiasMovesTowardsTheMeanLoad) {
    const std::vector<std::uint32_t> counts{10, 20, 15, 15, 0, 30};
    const std::vector<float> bias{0, 1, -1, 0.5f, 0, 0};
    const OpTensor counts_t = tensor(DType::U32, {6}, counts);
    const OpTensor bias_t = tensor(DType::F32, {6}, bias);
    run([&](Recording& recording) { ops::router_bias_update(recording, counts_t, bias_t, 0.25f); });
    EXPECT_EQ(read(bias_t), (std::vector<float>{0.25f, 0.75f, -1, 0.5f, 0.25f, -0.25f}));
}

TEST_F(OpsRouterRules, SaysWhatDoesNotFit) {
    const OpTensor logits = result(DType::F32, {3, 6});
    const OpTensor ids = result(DType::I32, {3, 7});
    const OpTensor weights = result(DType::F32, {3, 7});
    Recording recording(device(), QueueRole::Compute, "refused");
    try {
        ops::router_forward(recording, logits, {}, logits, ids, weights, {});
        FAIL() << "7 of 6 experts";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("top_k is 7 of 6"), std::string::npos) << error.message();
    }
    const OpTensor one = result(DType::I32, {3, 1});
    EXPECT_THROW(ops::expert_counts(recording, one, result(DType::U32, {2, 6}), true), Error)
        << "3 tokens in 2 sequences";
    EXPECT_THROW(ops::router_dgrad(recording, result(DType::F32, {3, 1}), one, logits, logits, {},
                                   {result(DType::U32, {3, 5}), 1}),
                 Error)
        << "5 counts of 6 experts";
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
