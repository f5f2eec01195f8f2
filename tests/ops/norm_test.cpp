// SPDX-License-Identifier: MIT
// RMSNorm and its gradients against the f64 reference, with strided rows and bf16 gains.

#include "reference/ops.hpp"
#include "support/op_test.hpp"

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct NormCase {
    std::uint64_t rows, columns;
    std::uint64_t gap; ///< columns between rows that belong to something else
    DType dtype, gain;
};

const NormCase kNormCases[] = {
    {1, 4, 0, DType::F32, DType::F32},       {7, 12, 8, DType::F32, DType::F32},
    {65, 36, 0, DType::F32, DType::F32},     {100, 256, 4, DType::F32, DType::F32},
    {3, 2048, 0, DType::F32, DType::F32},    {65, 36, 12, DType::BF16, DType::F32},
    {100, 256, 0, DType::BF16, DType::BF16}, {2, 1540, 4, DType::BF16, DType::BF16},
};

class OpsNorm : public testing::OpTest, public ::testing::WithParamInterface<NormCase> {
protected:
    /// The first `columns` of rows that are `gap` longer; all of the memory kUntouched.
    static OpTensor strided(const NormCase& c) {
        OpTensor whole = result(c.dtype, {c.rows, c.columns + c.gap});
        whole.view = ops::slice(whole.view, 1, 0, c.columns);
        return whole;
    }
    static void expect_gap_untouched(const NormCase& c, const OpTensor& tensor) {
        const auto all = read(
            TensorView::contiguous(tensor.buffer.view(), c.dtype, {c.rows, c.columns + c.gap}));
        for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_EQ(testing::untouched(all[i]), i % (c.columns + c.gap) >= c.columns) << i;
        }
    }
};

TEST_P(OpsNorm, MatchesTheReference) {
    const NormCase c = GetParam();
    const double eps = 1e-6;
    const auto x = random(c.dtype, c.rows * c.columns, 1, -3, 3);
    const auto dy = random(c.dtype, c.rows * c.columns, 2);
    const auto gain = random(c.gain, c.columns, 3, 0.5, 1.5);
    const auto before = random(c.dtype, c.rows * c.columns, 4);
    const OpTensor x_t = strided(c), dy_t = strided(c), added = strided(c);
    write(x_t.view, x);
    write(dy_t.view, dy);
    write(added.view, before);
    const OpTensor gain_t = tensor(c.gain, {c.columns}, gain);
    const OpTensor y = strided(c), dx = strided(c);
    const OpTensor inv_rms = result(DType::F32, {c.rows});
    const OpTensor d_gain = result(DType::F32, {c.columns});
    const Buffer scratch = workspace(ops::rmsnorm_wgrad_workspace_bytes(c.rows, c.columns));
    const auto record = [&](Recording& recording) {
        ops::rmsnorm_forward(recording, x_t, gain_t, y, inv_rms, static_cast<float>(eps));
        ops::rmsnorm_dgrad(recording, dy_t, x_t, gain_t, inv_rms, dx, false);
        ops::rmsnorm_wgrad(recording, dy_t, x_t, inv_rms, d_gain, false, scratch.view());
    };
    run(record);

    const auto xd = to_double(x), dyd = to_double(dy), gd = to_double(gain);
    const auto expected = reference::rmsnorm_forward(xd, gd, c.rows, c.columns, eps);
    const auto terms = static_cast<double>(c.columns);
    EXPECT_TRUE(elements_match(read(inv_rms), expected.inv_rms, {c.rows},
                               storage_bound(DType::F32, terms)));
    EXPECT_TRUE(elements_match(read(y), expected.y, {c.rows, c.columns},
                               storage_bound(c.dtype, terms + 4)));
    expect_gap_untouched(c, y);
    const auto expected_dx =
        reference::rmsnorm_input_grad(dyd, xd, gd, expected.inv_rms, c.rows, c.columns);
    EXPECT_TRUE(elements_match(read(dx), expected_dx, {c.rows, c.columns},
                               storage_bound(c.dtype, 2 * terms + 16, 2)));
    expect_gap_untouched(c, dx);
    auto expected_gain = reference::rmsnorm_gain_grad(dyd, xd, expected.inv_rms, c.rows, c.columns);
    const auto rows = static_cast<double>(c.rows);
    const auto gain_bound = storage_bound(DType::F32, rows + terms, 2 * rows);
    EXPECT_TRUE(elements_match(read(d_gain), expected_gain, {c.columns}, gain_bound));

    run([&](Recording& recording) {
        ops::rmsnorm_dgrad(recording, dy_t, x_t, gain_t, inv_rms, added, true);
        ops::rmsnorm_wgrad(recording, dy_t, x_t, inv_rms, d_gain, true, scratch.view());
    });
    auto expected_sum = expected_dx;
    reference::accumulate(expected_sum, to_double(before));
    EXPECT_TRUE(elements_match(read(added), expected_sum, {c.rows, c.columns},
                               storage_bound(c.dtype, 2 * terms + 16, 3)));
    reference::accumulate(expected_gain, reference::Vector(expected_gain));
    EXPECT_TRUE(elements_match(read(d_gain), expected_gain, {c.columns}, gain_bound));
}

TEST_P(OpsNorm, ARowsBitsDoNotDependOnTheOthers) {
    const NormCase c = GetParam();
    const auto x = random(c.dtype, c.rows * c.columns, 1, -3, 3);
    const OpTensor x_t = tensor(c.dtype, {c.rows, c.columns}, x);
    const OpTensor gain_t = tensor(c.gain, {c.columns}, random(c.gain, c.columns, 3));
    const OpTensor all = result(c.dtype, {c.rows, c.columns});
    const OpTensor one = result(c.dtype, {1, c.columns});
    const OpTensor inv_rms = result(DType::F32, {c.rows});
    const std::uint64_t row = c.rows - 1;
    run([&](Recording& recording) {
        ops::rmsnorm_forward(recording, x_t, gain_t, all, inv_rms, 1e-6f);
        ops::rmsnorm_forward(recording, x_t.view.rows(row, 1), gain_t, one, inv_rms.view.rows(0, 1),
                             1e-6f);
    });
    EXPECT_EQ(read(all.view.rows(row, 1)), read(one));
}

INSTANTIATE_TEST_SUITE_P(Table, OpsNorm, ::testing::ValuesIn(kNormCases));

using OpsNormRules = OpsNorm;

TEST_F(OpsNormRules, NoRowsGiveNoGradient) {
    const OpTensor none = result(DType::F32, {0, 8});
    const OpTensor inv_rms = result(DType::F32, {0});
    const OpTensor d_gain = result(DType::F32, {8});
    run([&](Recording& recording) {
        ops::rmsnorm_wgrad(recording, none, none, inv_rms, d_gain, false, {});
    });
    EXPECT_EQ(read(d_gain), std::vector<float>(8, 0));
}

TEST_F(OpsNormRules, SaysWhatDoesNotFit) {
    const OpTensor x = result(DType::F32, {2, 6});
    const OpTensor gain = result(DType::F32, {6});
    const OpTensor inv_rms = result(DType::F32, {2});
    Recording recording(device(), QueueRole::Compute, "refused");
    try {
        ops::rmsnorm_forward(recording, x, gain, x, inv_rms, 1e-6f);
        FAIL() << "6 columns";
    } catch (const Error& error) {
        EXPECT_NE(error.message().find("columns is 6"), std::string::npos) << error.message();
    }
}

} // namespace
} // namespace bellows
