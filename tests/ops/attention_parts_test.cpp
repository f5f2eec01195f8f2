// SPDX-License-Identifier: MIT
// Rotary embedding, the keys of latent attention and strided copies against the f64 reference or
// the definition.

#include "reference/ops.hpp"
#include "support/op_test.hpp"

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct RopeCase {
    std::uint64_t tokens, heads, nope, rope, seq, first;
    DType dtype;
};

const RopeCase kRopeCases[] = {
    {1, 1, 0, 4, 1, 0, DType::F32},     {7, 3, 8, 12, 7, 0, DType::F32},
    {30, 2, 4, 64, 10, 5, DType::F32},  {260, 4, 32, 16, 128, 0, DType::F32},
    {30, 2, 4, 64, 10, 5, DType::BF16}, {9, 5, 128, 64, 9, 1000, DType::BF16},
};

class OpsRope : public testing::OpTest, public ::testing::WithParamInterface<RopeCase> {};

TEST_P(OpsRope, TurnsTheRotaryPartInPlaceAndBack) {
    const RopeCase c = GetParam();
    const double theta = 10000;
    const std::uint64_t size = c.nope + c.rope, positions = c.first + c.seq;
    const auto x = random(c.dtype, c.tokens * c.heads * size, 1);
    const OpTensor x_t = tensor(c.dtype, {c.tokens, c.heads, size}, x);
    const OpTensor table =
        tensor(DType::F32, {positions, c.rope / 2, 2}, ops::rope_table(positions, c.rope, theta));
    const OpTensor back = result(c.dtype, {c.tokens, c.heads, c.rope});
    const TensorView part = ops::slice(x_t.view, 2, c.nope, c.rope);
    run([&](Recording& recording) {
        ops::rope_forward(recording, part, table, part, c.seq, c.first);
        ops::rope_dgrad(recording, part, table, back, c.seq, c.first);
    });

    std::vector<std::int64_t> at(c.tokens);
    for (std::size_t i = 0; i < at.size(); ++i) {
        at[i] = static_cast<std::int64_t>(c.first + i % c.seq);
    }
    const reference::RopeShape shape{.rows = c.tokens,
                                     .heads = c.heads,
                                     .head_dim = size,
                                     .offset = c.nope,
                                     .dim = c.rope,
                                     .theta = theta};
    const auto turned = read(x_t);
    EXPECT_TRUE(elements_match(turned, reference::rope(to_double(x), at, shape),
                               {c.tokens, c.heads, size}, storage_bound(c.dtype, 4, 2)));
    const auto expected = reference::rope(to_double(turned), at, shape, true);
    const auto actual = read(back);
    for (std::size_t i = 0; i < actual.size(); ++i) {
        const std::size_t head = i / c.rope;
        const double e = expected[head * size + c.nope + i % c.rope];
        EXPECT_LE(std::abs(actual[i] - e), storage_bound(c.dtype, 4, 2)(i, e)) << i;
    }
}

INSTANTIATE_TEST_SUITE_P(Table, OpsRope, ::testing::ValuesIn(kRopeCases));

TEST_F(OpsRope, TwoDimensionsAreOneHead) {
    const auto x = random(DType::F32, 6 * 24, 1);
    const OpTensor x_t = tensor(DType::F32, {6, 24}, x);
    const OpTensor y = result(DType::F32, {6, 8});
    const OpTensor table = tensor(DType::F32, {3, 4, 2}, ops::rope_table(3, 8, 100));
    const TensorView part = ops::slice(x_t.view, 1, 16, 8);
    run([&](Recording& recording) { ops::rope_forward(recording, part, table, y, 3); });
    const std::vector<std::int64_t> at{0, 1, 2, 0, 1, 2};
    const auto expected = reference::rope(
        to_double(x), at,
        {.rows = 6, .heads = 1, .head_dim = 24, .offset = 16, .dim = 8, .theta = 100});
    const auto actual = read(y);
    for (std::size_t i = 0; i < actual.size(); ++i) {
        EXPECT_NEAR(actual[i], expected[i / 8 * 24 + 16 + i % 8], 1e-6);
    }
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::rope_forward(recording, part, table, y, 4), Error) << "3 positions only";
}

struct KeysCase {
    std::uint64_t tokens, heads, nope, rope, value, latent;
    DType dtype;
};

const KeysCase kKeysCases[] = {
    {1, 1, 4, 4, 4, 0, DType::F32},           {9, 3, 8, 12, 20, 16, DType::F32},
    {130, 4, 32, 16, 32, 64, DType::F32},     {9, 3, 8, 12, 20, 16, DType::BF16},
    {70, 16, 128, 64, 128, 512, DType::BF16},
};

class OpsKeys : public testing::OpTest, public ::testing::WithParamInterface<KeysCase> {};

TEST_P(OpsKeys, AreAssembledAndTakenApart) {
    const KeysCase c = GetParam();
    const std::uint64_t size = c.nope + c.rope, up = c.nope + c.value;
    const auto kv_up = random(c.dtype, c.tokens * c.heads * up, 1);
    const auto kv_down = random(c.dtype, c.tokens * (c.latent + c.rope), 2);
    const auto d_keys = random(c.dtype, c.tokens * c.heads * size, 3);
    const OpTensor kv_up_t = tensor(c.dtype, {c.tokens, c.heads, up}, kv_up);
    const OpTensor kv_down_t = tensor(c.dtype, {c.tokens, c.latent + c.rope}, kv_down);
    const OpTensor d_keys_t = tensor(c.dtype, {c.tokens, c.heads, size}, d_keys);
    const OpTensor keys = result(c.dtype, {c.tokens, c.heads, size});
    const OpTensor d_kv_up = result(c.dtype, {c.tokens, c.heads, up});
    const OpTensor d_kv_down = result(c.dtype, {c.tokens, c.latent + c.rope});
    run([&](Recording& recording) {
        ops::mla_keys_forward(recording, kv_up_t, ops::slice(kv_down_t.view, 1, c.latent, c.rope),
                              keys);
        ops::mla_keys_dgrad(recording, d_keys_t, d_kv_up,
                            ops::slice(d_kv_down.view, 1, c.latent, c.rope));
    });

    const auto actual = read(keys), actual_up = read(d_kv_up), actual_down = read(d_kv_down);
    for (std::size_t t = 0; t < c.tokens; ++t) {
        for (std::size_t i = 0; i < c.latent; ++i) {
            EXPECT_TRUE(testing::untouched(actual_down[t * (c.latent + c.rope) + i]));
        }
        std::vector<double> sum(c.rope, 0);
        for (std::size_t h = 0; h < c.heads; ++h) {
            const std::size_t head = t * c.heads + h;
            for (std::size_t i = 0; i < up; ++i) {
                const float value = actual_up[head * up + i];
                if (i < c.nope) {
                    EXPECT_EQ(actual[head * size + i], kv_up[head * up + i]);
                    EXPECT_EQ(value, d_keys[head * size + i]);
                } else {
                    EXPECT_TRUE(testing::untouched(value));
                }
            }
            for (std::size_t i = 0; i < c.rope; ++i) {
                const std::size_t at = t * (c.latent + c.rope) + c.latent + i;
                EXPECT_EQ(actual[head * size + c.nope + i], kv_down[at]);
                sum[i] += d_keys[head * size + c.nope + i];
            }
        }
        for (std::size_t i = 0; i < c.rope; ++i) {
            const double bound = storage_bound(c.dtype, static_cast<double>(c.heads), 4)(i, sum[i]);
            EXPECT_NEAR(actual_down[t * (c.latent + c.rope) + c.latent + i], sum[i], bound);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Table, OpsKeys, ::testing::ValuesIn(kKeysCases));

class OpsCopy : public testing::OpTest, public ::testing::WithParamInterface<DType> {};

TEST_P(OpsCopy, MovesBetweenStridesAndAdds) {
    const DType dtype = GetParam();
    const auto x = random(dtype, 50 * 3 * 20, 1);
    const OpTensor x_t = tensor(dtype, {50, 3, 20}, x);
    const OpTensor y = result(dtype, {50, 3, 12});
    const OpTensor sum = result(dtype, {50, 3, 12});
    const TensorView part = ops::slice(x_t.view, 2, 8, 8);
    const TensorView to = ops::slice(y.view, 2, 4, 8);
    run([&](Recording& recording) {
        ops::copy(recording, part, to);
        ops::copy(recording, y.view.reshaped({150, 12}), sum.view.reshaped({150, 12}));
        ops::copy(recording, part, ops::slice(sum.view, 2, 4, 8), true);
    });
    const auto actual = read(y), doubled = read(sum);
    for (std::size_t i = 0; i < actual.size(); ++i) {
        if (i % 12 < 4) {
            EXPECT_TRUE(testing::untouched(actual[i]));
            EXPECT_TRUE(testing::untouched(doubled[i]));
        } else {
            EXPECT_EQ(actual[i], x[i / 12 * 20 + 8 + i % 12 - 4]);
            EXPECT_EQ(doubled[i], 2 * actual[i]);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Table, OpsCopy, ::testing::Values(DType::F32, DType::BF16));

} // namespace
} // namespace bellows
