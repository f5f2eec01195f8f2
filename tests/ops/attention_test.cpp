// SPDX-License-Identifier: MIT
// Causal attention and its gradients against the f64 reference, on parts of wider tensors.

#include "reference/ops.hpp"
#include "support/op_test.hpp"

#include <bellows/engine/attention.hpp>

#include <cmath>

namespace bellows {
namespace {

using test::elements_match;
using test::to_double;
using testing::OpTensor;

struct AttentionCase {
    const char* name;
    std::uint64_t sequences, seq, heads, qk_dim, v_dim;
    std::uint64_t gap; ///< elements behind each head that belong to something else
    DType dtype;
};

const AttentionCase kAttentionCases[] = {
    {"one_token", 3, 1, 1, 4, 4, 0, DType::F32},
    {"odd", 2, 33, 3, 16, 8, 0, DType::F32},
    {"parts", 1, 7, 2, 12, 20, 4, DType::F32},
    {"odd_sizes", 2, 10, 2, 5, 3, 1, DType::F32},
    {"tiny_model", 1, 100, 2, 48, 32, 0, DType::F32},
    {"v3_heads", 1, 37, 2, 192, 128, 0, DType::F32},
    {"odd_bf16", 2, 33, 3, 16, 8, 0, DType::BF16},
    {"parts_bf16", 1, 19, 2, 6, 10, 2, DType::BF16},
    {"wide_heads_bf16", 1, 37, 2, 72, 96, 8, DType::BF16},
};

class OpsAttention : public testing::OpTest, public ::testing::WithParamInterface<AttentionCase> {
protected:
    static OpTensor part(const AttentionCase& c, std::uint64_t size) {
        OpTensor whole = result(c.dtype, {c.sequences * c.seq, c.heads, size + c.gap});
        whole.view = ops::slice(whole.view, 2, 0, size);
        return whole;
    }
    static void expect_gap_untouched(const AttentionCase& c, const OpTensor& tensor,
                                     std::uint64_t size) {
        const auto all = read(TensorView::contiguous(tensor.buffer.view(), c.dtype,
                                                     {c.sequences * c.seq, c.heads, size + c.gap}));
        for (std::size_t i = 0; i < all.size(); ++i) {
            EXPECT_EQ(testing::untouched(all[i]), i % (size + c.gap) >= size) << i;
        }
    }
    /// Each element within one rounding to its storage and `error` of the largest expected value.
    static void expect_close(const char* name, const AttentionCase& c,
                             const std::vector<float>& actual, const reference::Vector& expected,
                             std::uint64_t size, double error) {
        double largest = 0;
        for (const double value : expected) {
            largest = std::max(largest, std::abs(value));
        }
        const double storage = c.dtype == DType::BF16 ? 1.01 * 0x1p-8 : 0;
        EXPECT_TRUE(elements_match(actual, expected, {c.sequences * c.seq, c.heads, size},
                                   test::within(error * largest, storage)))
            << name;
    }
};

TEST_P(OpsAttention, MatchesTheReference) {
    const AttentionCase c = GetParam();
    const std::uint64_t tokens = c.sequences * c.seq;
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.qk_dim));
    const auto q = random(c.dtype, tokens * c.heads * c.qk_dim, 1, -2, 2);
    const auto k = random(c.dtype, tokens * c.heads * c.qk_dim, 2, -2, 2);
    const auto v = random(c.dtype, tokens * c.heads * c.v_dim, 3);
    const auto d_o = random(c.dtype, tokens * c.heads * c.v_dim, 4);
    const OpTensor q_t = part(c, c.qk_dim), k_t = part(c, c.qk_dim);
    const OpTensor v_t = part(c, c.v_dim), d_o_t = part(c, c.v_dim), o = part(c, c.v_dim);
    const OpTensor dq = part(c, c.qk_dim), dk = part(c, c.qk_dim), dv = part(c, c.v_dim);
    write(q_t.view, q);
    write(k_t.view, k);
    write(v_t.view, v);
    write(d_o_t.view, d_o);
    const OpTensor lse = result(DType::F32, {tokens, c.heads});
    const Buffer scratch = workspace(ops::attention_dgrad_workspace_bytes(tokens, c.heads));
    const ops::AttentionOptions options{.seq = c.seq, .scale = scale};
    run([&](Recording& recording) {
        ops::attention_forward(recording, q_t, k_t, v_t, o, lse, options);
        ops::attention_dgrad(recording, d_o_t, q_t, k_t, v_t, o, lse,
                             {.dq = dq.view, .dk = dk.view, .dv = dv.view}, options,
                             scratch.view());
    });

    const reference::AttentionShape shape{.batch = c.sequences,
                                          .queries = c.seq,
                                          .keys = c.seq,
                                          .heads = c.heads,
                                          .qk_dim = c.qk_dim,
                                          .v_dim = c.v_dim,
                                          .scale = scale};
    const auto qd = to_double(q), kd = to_double(k), vd = to_double(v);
    const auto expected = reference::attention_forward(qd, kd, vd, shape);
    const auto actual_lse = read(lse); // [tokens, heads], the reference's [batch, heads, queries]
    for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t h = 0; h < c.heads; ++h) {
            const std::size_t at = (t / c.seq * c.heads + h) * c.seq + t % c.seq;
            EXPECT_NEAR(actual_lse[t * c.heads + h], expected.lse[at], 1e-5) << t << ", " << h;
        }
    }
    // Scores up to about 8 carry an error of 1e-6, which exp makes a relative error of its weight.
    expect_close("o", c, read(o), expected.out, c.v_dim, 1e-5);
    expect_gap_untouched(c, o, c.v_dim);
    const auto gradients = reference::attention_input_grad(to_double(d_o), qd, kd, vd, shape);
    // With o stored as bf16, delta = o . d_o carries its rounding, which dq and dk inherit.
    const double error = c.dtype == DType::BF16 ? 4 * 0x1p-8 : 3e-5;
    expect_close("dq", c, read(dq), gradients.dq, c.qk_dim, error);
    expect_close("dk", c, read(dk), gradients.dk, c.qk_dim, error);
    expect_close("dv", c, read(dv), gradients.dv, c.v_dim, 3e-5);
    expect_gap_untouched(c, dq, c.qk_dim);
    expect_gap_untouched(c, dk, c.qk_dim);
    expect_gap_untouched(c, dv, c.v_dim);
}

INSTANTIATE_TEST_SUITE_P(Table, OpsAttention, ::testing::ValuesIn(kAttentionCases),
                         [](const auto& test) { return std::string(test.param.name); });

TEST_F(OpsAttention, SaysWhatDoesNotFit) {
    const OpTensor q = result(DType::F32, {10, 2, 8}), lse = result(DType::F32, {10, 2});
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::attention_forward(recording, q, q, q, q, lse, {.seq = 3}), Error);
    EXPECT_THROW(ops::attention_forward(recording, q, q, q, lse, lse, {.seq = 5}), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
