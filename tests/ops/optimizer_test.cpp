// SPDX-License-Identifier: MIT
// Element-wise ops, reductions, the gradient norm and AdamW on any number of elements.

#include "reference/optimizer.hpp"
#include "support/op_test.hpp"

#include <cmath>
#include <limits>

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct FlatCase {
    std::uint64_t count;
    DType dtype;
};

const FlatCase kFlatCases[] = {
    {1, DType::F32},     {2, DType::F32},     {3, DType::F32},      {4, DType::F32},
    {1023, DType::F32},  {4096, DType::F32},  {4097, DType::F32},   {70001, DType::F32},
    {1, DType::BF16},    {2, DType::BF16},    {3, DType::BF16},     {4, DType::BF16},
    {1023, DType::BF16}, {8190, DType::BF16}, {70001, DType::BF16},
};

class OpsFlat : public testing::OpTest, public ::testing::WithParamInterface<FlatCase> {
protected:
    /// A tensor in a buffer that goes on behind it; `tail` sees what stands there.
    static OpTensor longer(const FlatCase& c) {
        OpTensor whole = result(c.dtype, {c.count + 8});
        whole.view = whole.view.rows(0, c.count);
        return whole;
    }
    static void expect_rest_untouched(const FlatCase& c, const OpTensor& tensor) {
        const auto all = read(TensorView::contiguous(tensor.buffer.view(), c.dtype, {c.count + 8}));
        for (std::size_t i = c.count; i < all.size(); ++i) {
            EXPECT_TRUE(testing::untouched(all[i])) << i;
        }
    }
};

TEST_P(OpsFlat, ScaleAddAndCast) {
    const FlatCase c = GetParam();
    const auto a = random(c.dtype, c.count, 1), b = random(c.dtype, c.count, 2);
    const OpTensor a_t = tensor(c.dtype, {c.count}, a), b_t = tensor(c.dtype, {c.count}, b);
    const OpTensor scaled = longer(c), sum = longer(c), same = longer(c);
    const DType other = c.dtype == DType::F32 ? DType::BF16 : DType::F32;
    const FlatCase other_case{c.count, other};
    const OpTensor converted = longer(other_case);
    run([&](Recording& recording) {
        ops::scale(recording, a_t, scaled, 0.375f);
        ops::add(recording, a_t, b_t, sum, 2, -3);
        ops::cast(recording, a_t, same);
        ops::cast(recording, a_t, converted);
        ops::add(recording, a_t, b_t, a_t);
    });
    reference::Vector expected_scaled, expected_sum, in_place;
    std::vector<float> expected_cast;
    for (std::size_t i = 0; i < c.count; ++i) {
        expected_scaled.push_back(0.375 * a[i]);
        expected_sum.push_back(2.0 * a[i] - 3.0 * b[i]);
        in_place.push_back(static_cast<double>(a[i]) + b[i]);
        expected_cast.push_back(test::round_to_bf16(a[i]));
    }
    EXPECT_TRUE(elements_match(read(scaled), expected_scaled, {}, storage_bound(c.dtype, 1)));
    EXPECT_TRUE(elements_match(read(sum), expected_sum, {}, storage_bound(c.dtype, 2, 5)));
    EXPECT_TRUE(elements_match(read(a_t), in_place, {}, storage_bound(c.dtype, 1)));
    EXPECT_EQ(read(same), a);
    EXPECT_EQ(read(converted), expected_cast);
    expect_rest_untouched(c, scaled);
    expect_rest_untouched(c, sum);
    expect_rest_untouched(other_case, converted);
}

TEST_P(OpsFlat, SumsAndSquares) {
    const FlatCase c = GetParam();
    const auto x = random(c.dtype, c.count, 1);
    // Behind the tensor stand NaNs, which would show.
    const OpTensor x_t = longer(c);
    write(x_t.view, x);
    const std::uint64_t partials = ops::num_partials(c.count);
    const OpTensor sums = result(DType::F32, {partials}), squares = result(DType::F32, {partials});
    const OpTensor sum = result(DType::F32, {2}), square = result(DType::F32, {2});
    const Buffer scratch = workspace(2 * ops::sum_pairs_workspace_bytes(partials));
    run([&](Recording& recording) {
        ops::sum_partials(recording, x_t, sums);
        ops::sum_squares_partials(recording, x_t, squares);
        ops::sum_pairs(recording, sums, sum, scratch.view());
        ops::sum_pairs(recording, squares, square, scratch.view());
    });
    double expected_sum = 0, expected_square = 0, absolute = 0;
    for (const double value : to_double(x)) {
        expected_sum += value;
        expected_square += value * value;
        absolute += std::abs(value);
    }
    const auto pair = [](const std::vector<float>& p) {
        return static_cast<double>(p[0]) + static_cast<double>(p[1]);
    };
    // Within a chunk of 4096 the error of an f32 sum; between chunks none.
    const double epsilon = 1100 * test::kF32Epsilon;
    EXPECT_NEAR(pair(read(sum)), expected_sum, epsilon * absolute);
    EXPECT_NEAR(pair(read(square)), expected_square, epsilon * expected_square);
}

INSTANTIATE_TEST_SUITE_P(Table, OpsFlat, ::testing::ValuesIn(kFlatCases), [](const auto& test) {
    return std::to_string(test.param.count) + (test.param.dtype == DType::F32 ? "_f32" : "_bf16");
});

class OpsOptimizer : public testing::OpTest {};

TEST_F(OpsOptimizer, PairsKeepWhatOneFloatLoses) {
    // 2^24 large values whose f32 sum would stand still, and terms that cancel.
    std::vector<float> values(2'000'003, 1.0f);
    values[0] = 1e9f;
    values[1'000'000] = 0x1p-20f;
    values[1'999'999] = -1e9f;
    const OpTensor values_t = tensor(DType::F32, {values.size()}, values);
    const OpTensor sum = result(DType::F32, {2});
    const Buffer scratch = workspace(ops::sum_pairs_workspace_bytes(values.size()));
    run([&](Recording& recording) { ops::sum_pairs(recording, values_t, sum, scratch.view()); });
    double expected = 0;
    for (const float value : values) {
        expected += value;
    }
    const auto pair = read(sum);
    EXPECT_NEAR(static_cast<double>(pair[0]) + pair[1], expected, 1e-6);
    EXPECT_EQ(pair[0], static_cast<float>(expected));
}

TEST_F(OpsOptimizer, CastRoundsToNearestEvenAndKeepsSpecialValues) {
    const float inf = std::numeric_limits<float>::infinity();
    const std::vector<float> values{1.00390625f, 1.01171875f, 1.00390637f,  3.4e38f,
                                    -inf,        -0.0f,       std::nanf("")};
    const OpTensor values_t = tensor(DType::F32, {values.size()}, values);
    const OpTensor cast = result(DType::BF16, {values.size()});
    const OpTensor back = result(DType::F32, {values.size()});
    run([&](Recording& recording) {
        ops::cast(recording, values_t, cast);
        ops::cast(recording, cast, back);
    });
    const auto actual = read(back);
    EXPECT_EQ(actual[0], 1.0f);
    EXPECT_EQ(actual[1], 1.015625f);
    EXPECT_EQ(actual[2], 1.0078125f);
    EXPECT_EQ(actual[3], inf);
    EXPECT_EQ(actual[4], -inf);
    EXPECT_TRUE(actual[5] == 0 && std::signbit(actual[5]));
    EXPECT_TRUE(std::isnan(actual[6]));
}

TEST_F(OpsOptimizer, ClipsTheNormOfManyTensors) {
    const auto a = test::random_f32(5000, 1), b = test::random_f32(77, 2);
    const std::uint64_t first = ops::num_partials(a.size()), all = first + ops::num_partials(77);
    const OpTensor a_t = tensor(DType::F32, {a.size()}, a), b_t = tensor(DType::F32, {77}, b);
    const OpTensor partials = result(DType::F32, {all}), squares = result(DType::F32, {2});
    const OpTensor clipped = result(DType::F32, {2}), kept = result(DType::F32, {2});
    const OpTensor off = result(DType::F32, {2});
    run([&](Recording& recording) {
        ops::sum_squares_partials(recording, a_t, partials.view.rows(0, first));
        ops::sum_squares_partials(recording, b_t, partials.view.rows(first, all - first));
        ops::sum_pairs(recording, partials, squares, {});
        ops::clip_coefficient(recording, squares, clipped, 1);
        ops::clip_coefficient(recording, squares, kept, 1000);
        ops::clip_coefficient(recording, squares, off, 0);
    });
    const auto ad = to_double(a), bd = to_double(b);
    const double norm = reference::global_norm({ad, bd});
    EXPECT_NEAR(read(clipped)[0], reference::clip_factor(norm, 1), 1e-6);
    EXPECT_NEAR(read(clipped)[1], norm, 1e-6 * norm);
    EXPECT_EQ(read(kept)[0], 1);
    EXPECT_EQ(read(off)[0], 1);
}

struct AdamwCase {
    std::uint64_t count;
    DType moments;
    bool copy, clip;
};

const AdamwCase kAdamwCases[] = {
    {1, DType::F32, false, false},    {7, DType::F32, true, true},  {4096, DType::F32, true, false},
    {10001, DType::F32, false, true}, {3, DType::BF16, true, true}, {4094, DType::BF16, true, true},
};

class OpsAdamw : public testing::OpTest, public ::testing::WithParamInterface<AdamwCase> {};

TEST_P(OpsAdamw, ThreeStepsMatchTheReference) {
    const AdamwCase c = GetParam();
    const ops::AdamwOptions options;
    reference::Vector weight = to_double(test::random_f32(c.count, 1));
    reference::Vector m(c.count, 0), v(c.count, 0);
    const OpTensor weight_t = tensor(DType::F32, {c.count}, weight);
    const OpTensor m_t = tensor(c.moments, {c.count}, m), v_t = tensor(c.moments, {c.count}, v);
    const OpTensor gradient_t = result(DType::F32, {c.count});
    const OpTensor copy = result(DType::BF16, {c.count});
    const OpTensor scalars = result(DType::F32, {3});
    const OpTensor clip = tensor(DType::F32, {2}, std::vector<float>{0.5f, 1});
    Recording recording(device(), QueueRole::Compute, "adamw");
    ops::adamw(recording, weight_t, gradient_t, m_t, v_t, c.copy ? copy.view : TensorView{},
               scalars, c.clip ? clip.view : TensorView{}, options);
    for (std::uint64_t step = 1; step <= 3; ++step) {
        const double lr = 1e-2 / static_cast<double>(step);
        const auto gradient = test::random_f32(c.count, 10 + step);
        write(gradient_t.view, gradient);
        const auto numbers = ops::adamw_scalars(options, lr, step);
        write(scalars.view, std::vector<float>(numbers.begin(), numbers.end()));
        device().submit(recording).wait();
        reference::Vector g = to_double(gradient);
        for (double& value : g) {
            value *= c.clip ? 0.5 : 1;
        }
        reference::adamw_step(weight, g, m, v,
                              {.lr = lr,
                               .beta1 = options.beta1,
                               .beta2 = options.beta2,
                               .eps = options.eps,
                               .weight_decay = options.weight_decay},
                              step);
        EXPECT_TRUE(elements_match(read(m_t), m, {}, storage_bound(c.moments, 16, 1)));
        EXPECT_TRUE(elements_match(read(v_t), v, {}, storage_bound(c.moments, 16)));
        // A step is lr times about 1; bf16 moments change it by their rounding.
        const double moments = c.moments == DType::BF16 ? 0.02 : 0;
        EXPECT_TRUE(elements_match(read(weight_t), weight, {},
                                   test::within(lr * (moments + 1e-5), 4 * test::kF32Epsilon)));
        m = to_double(read(m_t)); // from here on with the moments as they were stored
        v = to_double(read(v_t));
        const auto actual = read(weight_t);
        weight = to_double(actual);
        if (c.copy) {
            std::vector<float> rounded;
            for (const float value : actual) {
                rounded.push_back(test::round_to_bf16(value));
            }
            EXPECT_EQ(read(copy), rounded);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Table, OpsAdamw, ::testing::ValuesIn(kAdamwCases));

} // namespace
} // namespace bellows
