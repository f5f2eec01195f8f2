// SPDX-License-Identifier: MIT
// SwiGLU and its gradients against the f64 reference.

#include "reference/ops.hpp"
#include "support/op_test.hpp"

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;
using testing::storage_bound;

struct SwigluCase {
    std::uint64_t rows, ffn;
    DType dtype;
    bool weighted;
    std::int64_t row_count; ///< rows that exist by a count on the device; -1: no count
};

const SwigluCase kSwigluCases[] = {
    {1, 4, DType::F32, false, -1},     {3, 12, DType::F32, true, -1},
    {70, 36, DType::F32, true, 41},    {129, 100, DType::F32, false, 128},
    {5, 260, DType::F32, true, 0},     {2, 512, DType::F32, false, -1},
    {3, 12, DType::BF16, true, -1},    {70, 36, DType::BF16, true, 41},
    {129, 100, DType::BF16, false, 7}, {1, 1408, DType::BF16, true, -1},
};

class OpsSwiglu : public testing::OpTest, public ::testing::WithParamInterface<SwigluCase> {};

TEST_P(OpsSwiglu, MatchesTheReference) {
    const SwigluCase c = GetParam();
    const auto gate_up = random(c.dtype, c.rows * 2 * c.ffn, 1, -6, 6);
    const auto d_hidden = random(c.dtype, c.rows * c.ffn, 2);
    const auto weight = test::random_f32(c.rows, 3, 0, 1);
    OpTensor gate_up_t = tensor(c.dtype, {c.rows, 2 * c.ffn}, gate_up);
    const OpTensor d_hidden_t = tensor(c.dtype, {c.rows, c.ffn}, d_hidden);
    const OpTensor weight_t = tensor(DType::F32, {c.rows}, weight);
    const OpTensor hidden = result(c.dtype, {c.rows, c.ffn});
    const OpTensor d_gate_up = result(c.dtype, {c.rows, 2 * c.ffn});
    const OpTensor d_weight = result(DType::F32, {c.rows});
    const OpTensor count = tensor(DType::U32, {1}, std::vector<std::int64_t>{c.row_count});
    if (c.row_count >= 0) {
        gate_up_t.view = gate_up_t.view.with_row_count(count.view.buffer);
    }
    run([&](Recording& recording) {
        const TensorView none;
        ops::swiglu_forward(recording, gate_up_t, c.weighted ? weight_t.view : none, hidden);
        ops::swiglu_dgrad(recording, d_hidden_t, gate_up_t, c.weighted ? weight_t.view : none,
                          d_gate_up, c.weighted ? d_weight.view : none);
    });

    const std::uint64_t rows = c.row_count < 0 ? c.rows : static_cast<std::uint64_t>(c.row_count);
    const auto head = [&](std::vector<float> values, std::uint64_t columns) {
        for (std::size_t i = rows * columns; i < values.size(); ++i) {
            EXPECT_TRUE(testing::untouched(values[i])) << "element " << i << " behind the rows";
        }
        values.resize(rows * columns);
        return values;
    };
    auto x = to_double(gate_up), dy = to_double(d_hidden), w = to_double(weight);
    x.resize(rows * 2 * c.ffn);
    dy.resize(rows * c.ffn);
    w.resize(c.weighted ? rows : 0);
    // Some 10 roundings; 1 + gate * (1 - s) may cancel, hence the absolute part.
    EXPECT_TRUE(elements_match(head(read(hidden), c.ffn),
                               reference::swiglu_forward(x, w, rows, c.ffn), {rows, c.ffn},
                               storage_bound(c.dtype, 12)));
    const auto expected = reference::swiglu_input_grad(dy, x, w, rows, c.ffn);
    EXPECT_TRUE(elements_match(head(read(d_gate_up), 2 * c.ffn), expected.dx, {rows, 2 * c.ffn},
                               storage_bound(c.dtype, 16, 6)));
    if (c.weighted) {
        const auto terms = static_cast<double>(c.ffn);
        EXPECT_TRUE(elements_match(head(read(d_weight), 1), expected.dweight, {rows},
                                   storage_bound(DType::F32, terms + 12, 36 * terms)));
    }
}

INSTANTIATE_TEST_SUITE_P(Table, OpsSwiglu, ::testing::ValuesIn(kSwigluCases));

} // namespace
} // namespace bellows
