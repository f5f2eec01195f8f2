// SPDX-License-Identifier: MIT
// The f64 reference ops against finite differences, hand-computed values and properties; and the
// comparison helpers that all numeric tests rely on.

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "verify/reference/ops.hpp"
#include "verify/reference/optimizer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace bellows::reference {
namespace {

using test::dot;
using test::elements_match;
using test::gradient_matches;
using test::within;

Vector random(std::size_t count, std::uint64_t seed) {
    return test::to_double(test::random_f32(count, seed));
}

const auto kExact = within(1e-13, 1e-13);

TEST(Compare, RoundsToBf16) {
    EXPECT_EQ(test::bf16_bits(1.0f), 0x3f80);
    EXPECT_EQ(test::round_to_bf16(1.00390625f), 1.0f) << "halfway, the even one is below";
    EXPECT_EQ(test::round_to_bf16(1.01171875f), 1.015625f) << "halfway, the even one is above";
    EXPECT_EQ(test::round_to_bf16(1.00390637f), 1.0078125f) << "just above halfway";
    EXPECT_TRUE(std::isinf(test::round_to_bf16(3.4e38f)));
    EXPECT_TRUE(std::isnan(test::round_to_bf16(std::numeric_limits<float>::quiet_NaN())));
    for (const float value : test::random_bf16(100, 7))
        EXPECT_EQ(test::round_to_bf16(value), value);
}

TEST(Compare, UlpDistance) {
    EXPECT_EQ(test::ulp_distance(1.0f, std::nextafter(1.0f, 2.0f)), 1u);
    EXPECT_EQ(test::ulp_distance(-0.0f, 0.0f), 0u);
    EXPECT_EQ(test::ulp_distance(-std::numeric_limits<float>::denorm_min(),
                                 std::numeric_limits<float>::denorm_min()),
              2u);
}

TEST(Compare, OneWrongElementShows) {
    std::vector<float> actual = test::random_f32(1000, 3);
    const Vector expected = test::to_double(actual);
    EXPECT_EQ(test::calc_diff(actual, expected), 0);
    actual[523] += 1e-3f;
    actual[900] += 1e-2f;
    EXPECT_LT(test::calc_diff(actual, expected), 1e-6) << "the norm alone would let it pass";
    const auto result = elements_match(actual, expected, {10, 4, 25}, within(0, 1e-6));
    ASSERT_FALSE(result);
    const std::string message = result.message();
    EXPECT_NE(message.find("2 of 1000"), std::string::npos) << message;
    EXPECT_NE(message.find("first at [5, 0, 23]"), std::string::npos) << message;
    EXPECT_NE(message.find("worst at [9, 0, 0]"), std::string::npos) << message;
}

TEST(Compare, NothingHidesBehindNan) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double inf = std::numeric_limits<double>::infinity();
    EXPECT_TRUE(std::isnan(test::calc_diff(Vector{nan, 1}, Vector{1, 1})));
    EXPECT_TRUE(std::isnan(test::calc_diff(Vector{1}, Vector{1, 1})));
    EXPECT_EQ(test::calc_diff(Vector{0, 0}, Vector{0, 0}), 0);
    EXPECT_DOUBLE_EQ(test::calc_diff(Vector{1, 2}, Vector{-1, -2}), 2);
    EXPECT_FALSE(elements_match(Vector{nan}, Vector{1}, {}, within(inf, 1)));
    EXPECT_FALSE(elements_match(Vector{1}, Vector{nan}, {}, within(1, 1)));
    EXPECT_FALSE(elements_match(Vector{inf}, Vector{1}, {}, within(inf, 1)));
    EXPECT_FALSE(elements_match(Vector{1}, Vector{1, 1}, {}, within(1, 1)));
    EXPECT_TRUE(elements_match(Vector{inf}, Vector{inf}, {}, within(0, 0)));
}

TEST(Gemm, AgreesWithItsTransposes) {
    const std::size_t m = 3, n = 5, k = 4;
    const Vector a = random(m * k, 1), b = random(k * n, 2);
    const Vector c = gemm_nn(a, b, m, n, k);
    for (std::size_t i = 0; i < m; ++i) {
        for (std::size_t j = 0; j < n; ++j) {
            double sum = 0;
            for (std::size_t p = 0; p < k; ++p)
                sum += a[i * k + p] * b[p * n + j];
            EXPECT_NEAR(c[i * n + j], sum, 1e-15) << i << "," << j;
        }
    }
    EXPECT_EQ(gemm_nt(a, transpose(b, k, n), m, n, k), c);
    EXPECT_EQ(gemm_tn(transpose(a, m, k), b, m, n, k), c);
    EXPECT_THROW(gemm_nn(a, b, m, n, k + 1), std::invalid_argument);
}

TEST(Gemm, LinearGradients) {
    const std::size_t rows = 4, in = 3, out = 5;
    const Vector x = random(rows * in, 1), w = random(out * in, 2), dy = random(rows * out, 3);
    const auto loss = [&](View x_, View w_) { return dot(gemm_nt(x_, w_, rows, out, in), dy); };
    EXPECT_TRUE(gradient_matches(gemm_nn(dy, w, rows, in, out), x,
                                 [&](const Vector& v) { return loss(v, w); }));
    EXPECT_TRUE(gradient_matches(gemm_tn(dy, x, out, in, rows), w,
                                 [&](const Vector& v) { return loss(x, v); }));
}

TEST(RmsNorm, ValuesAndGradients) {
    const RmsNorm by_hand = rmsnorm_forward(Vector{3, 4}, Vector{1, 2}, 1, 2, 12.5);
    EXPECT_TRUE(elements_match(by_hand.y, Vector{0.6, 1.6}, {}, kExact)); // sqrt(12.5 + 12.5) = 5
    EXPECT_DOUBLE_EQ(by_hand.inv_rms[0], 0.2);

    const std::size_t rows = 3, columns = 7;
    const double eps = 1e-2; // large enough to matter
    const Vector x = random(rows * columns, 1), gain = random(columns, 2);
    const Vector dy = random(rows * columns, 3);
    const auto loss = [&](View x_, View g) {
        return dot(rmsnorm_forward(x_, g, rows, columns, eps).y, dy);
    };
    const Vector inv = rmsnorm_forward(x, gain, rows, columns, eps).inv_rms;
    EXPECT_TRUE(gradient_matches(rmsnorm_input_grad(dy, x, gain, inv, rows, columns), x,
                                 [&](const Vector& v) { return loss(v, gain); }));
    EXPECT_TRUE(gradient_matches(rmsnorm_gain_grad(dy, x, inv, rows, columns), gain,
                                 [&](const Vector& v) { return loss(x, v); }));
}

TEST(Rope, TurnsInterleavedPairs) {
    const RopeShape one{.rows = 1, .head_dim = 4, .dim = 4, .theta = 100};
    const std::vector<std::int64_t> position = {3};
    const Vector y = rope(Vector{1, 0, 0, 1}, position, one);
    EXPECT_TRUE(elements_match(
        y, Vector{std::cos(3.0), std::sin(3.0), -std::sin(0.3), std::cos(0.3)}, {}, kExact));
}

TEST(Rope, GradientAndRelativePosition) {
    const RopeShape shape{.rows = 3, .heads = 2, .head_dim = 9, .offset = 3, .dim = 6};
    const std::vector<std::int64_t> positions = {0, 5, 1000};
    const Vector x = random(54, 1), dy = random(54, 2);
    EXPECT_TRUE(gradient_matches(rope(dy, positions, shape, true), x, [&](const Vector& v) {
        return dot(rope(v, positions, shape), dy);
    }));
    const Vector back = rope(rope(x, positions, shape), positions, shape, true);
    EXPECT_TRUE(elements_match(back, x, {3, 2, 9}, within(1e-12, 0)));

    const RopeShape single{.rows = 1, .head_dim = 6, .dim = 6};
    const Vector q = random(6, 3), k = random(6, 4);
    const auto at = [&](View v, std::int64_t position) {
        return rope(v, std::vector<std::int64_t>{position}, single);
    };
    EXPECT_NEAR(dot(at(q, 17), at(k, 12)), dot(at(q, 1005), at(k, 1000)), 1e-12)
        << "only the distance counts";
}

TEST(Attention, HandComputedRow) {
    // One head; the second query sees both keys with probabilities 1/4 and 3/4.
    const AttentionShape s{.queries = 2, .keys = 2, .qk_dim = 1, .v_dim = 2, .scale = 0.5};
    const Vector q = {1, 2}, k = {0, std::log(3.0)}, v = {1, 2, 5, 10};
    const Attention a = attention_forward(q, k, v, s);
    EXPECT_TRUE(elements_match(a.out, Vector{1, 2, 4, 8}, {2, 2}, kExact));
    EXPECT_TRUE(elements_match(a.lse, Vector{0, std::log(4.0)}, {}, kExact));
}

TEST(Attention, GradientsForUnequalHeadSizes) {
    for (const std::size_t queries : {std::size_t{4}, std::size_t{2}}) { // 2: with a past of 2 keys
        const AttentionShape s{.batch = 2,
                               .queries = queries,
                               .keys = 4,
                               .heads = 2,
                               .qk_dim = 3,
                               .v_dim = 5,
                               .scale = 0.7};
        const Vector q = random(s.batch * queries * 6, 1), k = random(48, 2), v = random(80, 3);
        const Vector dout = random(s.batch * queries * 10, 4);
        const auto loss = [&](View q_, View k_, View v_) {
            return dot(attention_forward(q_, k_, v_, s).out, dout);
        };
        const AttentionGrads g = attention_input_grad(dout, q, k, v, s);
        EXPECT_TRUE(gradient_matches(g.dq, q, [&](const Vector& x) { return loss(x, k, v); }));
        EXPECT_TRUE(gradient_matches(g.dk, k, [&](const Vector& x) { return loss(q, x, v); }));
        EXPECT_TRUE(gradient_matches(g.dv, v, [&](const Vector& x) { return loss(q, k, x); }));
    }
}

TEST(Attention, SeesNoFuture) {
    const AttentionShape s{.queries = 5, .keys = 5, .qk_dim = 2, .v_dim = 2};
    const Vector q = random(10, 1), v = random(10, 3);
    Vector k = random(10, 2);
    const Vector before = attention_forward(q, k, v, s).out;
    k[8] += 1; // the last key
    const Vector after = attention_forward(q, k, v, s).out;
    for (std::size_t i = 0; i < 8; ++i)
        EXPECT_EQ(before[i], after[i]) << i;
    EXPECT_NE(before[9], after[9]);
}

TEST(Swiglu, ValuesAndGradients) {
    const Vector by_hand = swiglu_forward(Vector{1, 3}, Vector{2}, 1, 1);
    EXPECT_NEAR(by_hand[0], 6 / (1 + std::exp(-1.0)), 1e-15) << "gate first";
    EXPECT_NEAR(swiglu_forward(Vector{-800, 3}, {}, 1, 1)[0], 0, 1e-300) << "no overflow to NaN";

    const std::size_t rows = 3, ffn = 4;
    const Vector x = random(rows * 2 * ffn, 1), weight = random(rows, 2),
                 dy = random(rows * ffn, 3);
    const auto loss = [&](View x_, View w) { return dot(swiglu_forward(x_, w, rows, ffn), dy); };
    const SwigluGrads weighted = swiglu_input_grad(dy, x, weight, rows, ffn);
    const SwigluGrads plain = swiglu_input_grad(dy, x, {}, rows, ffn);
    EXPECT_TRUE(gradient_matches(weighted.dx, x, [&](const Vector& v) { return loss(v, weight); }));
    EXPECT_TRUE(
        gradient_matches(weighted.dweight, weight, [&](const Vector& v) { return loss(x, v); }));
    EXPECT_TRUE(gradient_matches(plain.dx, x, [&](const Vector& v) { return loss(v, {}); }));
}

TEST(Embedding, ValuesAndGradient) {
    const std::vector<std::int32_t> tokens = {2, 0, 2};
    const Vector table = random(4 * 3, 1), dy = random(3 * 3, 2);
    const Vector y = embedding_forward(table, tokens, 3);
    EXPECT_EQ(y[0], table[6]);
    EXPECT_EQ(y[4], table[1]);
    EXPECT_TRUE(
        gradient_matches(embedding_weight_grad(dy, tokens, 4, 3), table, [&](const Vector& v) {
            return dot(embedding_forward(v, tokens, 3), dy);
        }));
}

TEST(CrossEntropy, ValuesGradientAndIgnoredRows) {
    const std::size_t vocabulary = 6;
    const std::vector<std::int32_t> targets = {5, -1, 0};
    const CrossEntropy uniform = cross_entropy(Vector(18, 1000.0), targets, vocabulary, 1);
    EXPECT_NEAR(uniform.losses[0], std::log(6.0), 1e-12);
    EXPECT_EQ(uniform.losses[1], 0);
    EXPECT_EQ(uniform.count, 2u);

    const Vector logits = random(18, 1);
    const CrossEntropy c = cross_entropy(logits, targets, vocabulary, 0.25);
    EXPECT_NEAR(c.sum, c.losses[0] + c.losses[2], 1e-15);
    EXPECT_TRUE(gradient_matches(c.dlogits, logits, [&](const Vector& v) {
        return 0.25 * cross_entropy(v, targets, vocabulary, 1).sum;
    }));
    for (std::size_t i = 6; i < 12; ++i)
        EXPECT_EQ(c.dlogits[i], 0);
    EXPECT_THROW(cross_entropy(logits, std::vector<std::int32_t>{0, 6, 0}, vocabulary, 1),
                 std::invalid_argument);
}

TEST(AdamW, FirstStepsByHand) {
    const AdamW config{.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 0, .weight_decay = 0.5};
    Vector p = {2}, m = {0}, v = {0};
    adamw_step(p, Vector{4}, m, v, config, 1);
    EXPECT_NEAR(p[0], 2 - 0.1 * (1 + 1), 1e-15) << "the first direction is the gradient's sign";
    EXPECT_NEAR(m[0], 0.4, 1e-15);
    EXPECT_NEAR(v[0], 0.16, 1e-15);
    adamw_step(p, Vector{-1}, m, v, config, 2);
    const double m_hat = (0.9 * 0.4 - 0.1) / 0.19, v_hat = (0.99 * 0.16 + 0.01) / 0.0199;
    EXPECT_NEAR(p[0], 1.8 - 0.1 * (m_hat / std::sqrt(v_hat) + 0.9), 1e-14);
}

TEST(AdamW, ClipsByTheGlobalNorm) {
    const Vector a = {3}, b = {0, 4};
    EXPECT_DOUBLE_EQ(global_norm({a, b}), 5);
    EXPECT_DOUBLE_EQ(clip_factor(5, 1), 0.2);
    EXPECT_DOUBLE_EQ(clip_factor(0.5, 1), 1);
    EXPECT_DOUBLE_EQ(clip_factor(5, 0), 1) << "0: no clipping";
}

} // namespace
} // namespace bellows::reference
