// SPDX-License-Identifier: MIT
// The router's rules that show in single tokens: ties, NaN, absent experts; refusals.

#include "support/op_test.hpp"

#include <bellows/kernels/kernels.hpp>

#include <cmath>

namespace bellows {
namespace {

using testing::OpTensor;

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

struct Chosen {
    std::vector<int> ids;
    std::vector<float> weights;
};

/// Workgroups of many invocations for a token, as GPUs have them, beside one invocation.
TEST_F(OpsRouterRules, EveryFormChoosesTheSame) {
    const float nan = std::nanf(""), inf = INFINITY;
    const std::uint32_t tokens = 9;
    for (const std::uint32_t experts : {6u, 64u, 256u, 300u})
        for (const std::uint32_t groups : {1u, 2u})
            for (const bool softmax : {false, true}) {
                // Whole numbers, so that many are equal.
                std::vector<float> values(tokens * experts), biases(experts);
                for (std::uint32_t i = 0; i < values.size(); ++i)
                    values[i] = static_cast<float>((i * i * 7 + i / 3) % 11) - 5;
                for (std::uint32_t e = 0; e < experts; ++e)
                    biases[e] = static_cast<float>(e % 3) / 4 - 0.25f;
                if (!softmax)
                    values[1] = nan, values[2] = -inf, values[experts + 3] = nan, values[5] = inf;
                const OpTensor logits = tensor(DType::F32, {tokens, experts}, values),
                               bias = tensor(DType::F32, {experts}, biases);
                const std::uint32_t top_k = experts == 6 ? 3 : 8;
                const auto chosen = [&](std::uint32_t local_size, bool by_workgroup) {
                    const OpTensor scores = result(DType::F32, {tokens, experts}),
                                   ids = result(DType::I32, {tokens, top_k}),
                                   weights = result(DType::F32, {tokens, top_k});
                    run([&](Recording& r) {
                        r.dispatch(
                            kernels::RouterForward{
                                .constants = {.local_size = local_size,
                                              .row_per_workgroup = by_workgroup ? 1u : 0u,
                                              .shared_experts = by_workgroup ? experts : 1u},
                                .logits = logits.view.buffer,
                                .bias = bias.view.buffer,
                                .scores = scores.view.buffer,
                                .topk_ids = ids.view.buffer,
                                .topk_weights = weights.view.buffer,
                                .tokens = tokens,
                                .experts = experts,
                                .top_k = top_k,
                                .groups = groups,
                                .group_top_k = 1,
                                .group_score_top = 2,
                                .use_softmax = softmax ? 1u : 0u,
                                .normalise = 1,
                                .has_bias = 1,
                                .route_scale = 2.5f},
                            {4});
                    });
                    return Chosen{read<int>(ids), read(weights)};
                };
                const Chosen expected = chosen(8, false);
                for (const std::uint32_t local_size : {32u, 64u}) {
                    SCOPED_TRACE(std::to_string(experts) + " experts in " + std::to_string(groups) +
                                 (softmax ? ", softmax, " : ", ") + std::to_string(local_size));
                    const Chosen other = chosen(local_size, true);
                    EXPECT_EQ(other.ids, expected.ids);
                    for (std::size_t i = 0; i < expected.weights.size(); ++i) {
                        if (std::isnan(expected.weights[i]))
                            continue;
                        // Sums of softmax differ in order.
                        EXPECT_NEAR(other.weights[i], expected.weights[i], 1e-6);
                    }
                }
            }
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

TEST_F(OpsRouterRules, BalanceCountsFollowTheRulesOfTheChoice) {
    const float nan = std::nanf("");
    const OpTensor scores = tensor(DType::F32, {4, 4},
                                   std::vector<float>{0.5f, 0.5f, 0.5f, 0.5f, //
                                                      nan, 0.1f, nan, 0.2f,   //
                                                      nan, nan, nan, 0.2f,    //
                                                      0.1f, 0.9f, 0.8f, 0.1f});
    const OpTensor ids =
        tensor(DType::I32, {4, 2}, std::vector<std::int32_t>{3, 2, 0, -1, 2, 1, 9, -1});
    const ops::BalanceCounts counted{.of_scores = true, .devices = 2, .tokens = true};
    const OpTensor one = result(DType::U32, {1, counted.columns(4)});
    const OpTensor two = result(DType::U32, {2, 8});
    run([&](Recording& recording) {
        recording.fill(one.view.buffer, 0);
        recording.fill(two.view.buffer, 0);
        ops::balance_counts(recording, scores, ids, one, counted);
        ops::balance_counts(recording, scores, ids, one, counted);
        ops::balance_counts(recording, scores, ids, two, {.devices = 2});
    });
    EXPECT_EQ(read<int>(one), (std::vector<int>{4, 6, 2, 4, /**/ 4, 6, /**/ 4, 4, /**/ 8}));
    EXPECT_EQ(read<int>(two), (std::vector<int>{1, 0, 1, 1, /**/ 1, 2, /**/ 1, 1, //
                                                0, 1, 1, 0, /**/ 1, 1, /**/ 1, 1}));
}

TEST_F(OpsRouterRules, CapacityKeepsTheHighestScoresOfAGroup) {
    const OpTensor scores =
        tensor(DType::F32, {4, 4},
               std::vector<float>{0.5f, 0.4f, 0.1f, 0.2f, //
                                  0.5f, 0.6f, 0.1f, 0.2f, //
                                  0.5f, 0.1f, std::nanf(""), 0.2f, 0.5f, 0.9f, 0.3f, 0.1f});
    const std::vector<std::int32_t> chosen{0, 1, 1, 0, 0, 2, 3, -1};
    const OpTensor ids = tensor(DType::I32, {4, 2}, chosen);
    const OpTensor kept = result(DType::I32, {4, 2}), all = result(DType::I32, {4, 2}),
                   one = result(DType::I32, {4, 2});
    run([&](Recording& recording) {
        ops::router_capacity(recording, scores, ids, kept, 2, 3);
        ops::router_capacity(recording, scores, ids, all, 2, 5);
        ops::router_capacity(recording, scores, ids, one, 2, 1);
    });
    EXPECT_EQ(read<int>(kept), (std::vector<int>{0, -1, 1, 0, -1, 2, 3, -1}));
    EXPECT_EQ(read<int>(all), chosen);
    EXPECT_EQ(read<int>(one), (std::vector<int>{-1, -1, 1, -1, -1, -1, 3, -1}));
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::router_capacity(recording, scores, ids, kept, 3, 1), Error);
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
    EXPECT_THROW(ops::router_dgrad(recording, result(DType::F32, {3, 1}), one, logits, logits, {},
                                   {result(DType::U32, {3, 6}), 1, 1}),
                 Error)
        << "a loss of devices without their counts";
    EXPECT_THROW(
        ops::balance_counts(recording, logits, one, result(DType::U32, {1, 14}), {.devices = 4}),
        Error)
        << "6 experts on 4 devices";
    EXPECT_THROW(
        ops::balance_counts(recording, logits, one, result(DType::U32, {3, 7}), {.tokens = true}),
        Error)
        << "tokens of 3 runs";
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
