// SPDX-License-Identifier: MIT
// Rotary embedding, the keys of latent attention, strided copies, and causal attention with its
// gradients on parts of wider tensors.
#include "app/selftest/suite.hpp"

#include "reference/ops.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/ops.hpp>

namespace bellows::selftest {

namespace {

using reference::to_double;

struct RopeCase {
    std::uint64_t tokens, heads, nope, rope, seq, first;
};

void check_rope(Check& check, const OpRig& rig, DType dtype, const RopeCase& c) {
    check.begin_case(std::to_string(c.tokens) + " tokens, " + std::to_string(c.heads) +
                     " heads of " + std::to_string(c.nope) + " + " + std::to_string(c.rope));
    constexpr double kTheta = 10000;
    const std::uint64_t size = c.nope + c.rope, positions = c.first + c.seq;
    const auto x = OpRig::random(dtype, c.tokens * c.heads * size, 1);
    const OpTensor x_t = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor y_t = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor back = rig.tensor(dtype, {c.tokens, c.heads, size}, x);
    const OpTensor table = rig.tensor(DType::F32, {positions, c.rope / 2, 2},
                                      ops::rope_table(positions, c.rope, kTheta));
    const auto part = [&](const OpTensor& whole) {
        return ops::slice(whole.view, 2, c.nope, c.rope);
    };
    rig.run([&](Recording& recording) {
        ops::rope_forward(recording, part(y_t), table, part(y_t), c.seq, c.first); // in place
        ops::rope_dgrad(recording, part(x_t), table, part(back), c.seq, c.first);
    });
    std::vector<std::int64_t> at(c.tokens);
    for (std::size_t i = 0; i < at.size(); ++i)
        at[i] = static_cast<std::int64_t>(c.first + i % c.seq);
    const reference::RopeShape shape{.rows = c.tokens,
                                     .heads = c.heads,
                                     .head_dim = size,
                                     .offset = c.nope,
                                     .dim = c.rope,
                                     .theta = kTheta};
    check.elements("forward", rig.read(y_t), reference::rope(to_double(x), at, shape),
                   {c.tokens, c.heads, size}, storage_bound(dtype, 4, 2));
    check.elements("input gradient", rig.read(back), reference::rope(to_double(x), at, shape, true),
                   {c.tokens, c.heads, size}, storage_bound(dtype, 4, 2));
}

void check_keys(Check& check, const OpRig& rig, DType dtype, std::uint64_t tokens,
                std::uint64_t heads, std::uint64_t nope, std::uint64_t rope) {
    check.begin_case(std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads of " +
                     std::to_string(nope) + " + " + std::to_string(rope));
    const std::uint64_t size = nope + rope, up = nope + 8, down = rope + 16;
    const auto kv_up = OpRig::random(dtype, tokens * heads * up, 1);
    const auto kv_down = OpRig::random(dtype, tokens * down, 2);
    const auto d_keys = OpRig::random(dtype, tokens * heads * size, 3);
    const OpTensor kv_up_t = rig.tensor(dtype, {tokens, heads, up}, kv_up);
    const OpTensor kv_down_t = rig.tensor(dtype, {tokens, down}, kv_down);
    const OpTensor d_keys_t = rig.tensor(dtype, {tokens, heads, size}, d_keys);
    const OpTensor keys = rig.result(dtype, {tokens, heads, size});
    const OpTensor d_up = rig.tensor(dtype, {tokens, heads, up}, kv_up);
    const OpTensor d_down = rig.tensor(dtype, {tokens, down}, kv_down);
    rig.run([&](Recording& recording) {
        ops::mla_keys_forward(recording, kv_up_t, ops::slice(kv_down_t.view, 1, 16, rope), keys);
        ops::mla_keys_dgrad(recording, d_keys_t, d_up, ops::slice(d_down.view, 1, 16, rope));
    });
    std::vector<float> expected_keys, expected_up = kv_up;
    reference::Vector expected_down = to_double(kv_down);
    for (std::uint64_t t = 0; t < tokens; ++t) {
        for (std::uint64_t i = 0; i < rope; ++i)
            expected_down[t * down + 16 + i] = 0;
        for (std::uint64_t h = 0; h < heads; ++h)
            for (std::uint64_t i = 0; i < size; ++i) {
                const std::uint64_t head = t * heads + h;
                const float d = d_keys[head * size + i];
                expected_keys.push_back(i < nope ? kv_up[head * up + i]
                                                 : kv_down[t * down + 16 + i - nope]);
                if (i < nope)
                    expected_up[head * up + i] = d;
                else
                    expected_down[t * down + 16 + i - nope] += d;
            }
    }
    check.exact("forward", rig.read(keys), expected_keys);
    check.exact("gradient of kv_up", rig.read(d_up), expected_up);
    check.elements("gradient of k_rope", rig.read(d_down), expected_down, {tokens, down},
                   storage_bound(dtype, static_cast<double>(heads), 4));
}

void check_copy(Check& check, const OpRig& rig, DType dtype) {
    check.begin_case("50 x 3 x 8 in 20 to 12");
    const auto x = OpRig::random(dtype, 50 * 3 * 20, 1);
    const auto before = OpRig::random(dtype, 50 * 3 * 12, 2);
    const OpTensor x_t = rig.tensor(dtype, {50, 3, 20}, x);
    const OpTensor y = rig.tensor(dtype, {50, 3, 12}, before);
    const OpTensor sum = rig.tensor(dtype, {50, 3, 12}, before);
    rig.run([&](Recording& recording) {
        const TensorView part = ops::slice(x_t.view, 2, 8, 8);
        ops::copy(recording, part, ops::slice(y.view, 2, 4, 8));
        ops::copy(recording, part, ops::slice(sum.view, 2, 4, 8), true);
    });
    std::vector<float> moved = before;
    reference::Vector added = to_double(before);
    for (std::size_t i = 0; i < moved.size(); ++i)
        if (i % 12 >= 4) {
            moved[i] = x[i / 12 * 20 + 8 + i % 12 - 4];
            added[i] += moved[i];
        }
    check.exact("copy", rig.read(y), moved);
    check.elements("add", rig.read(sum), added, {50, 3, 12}, storage_bound(dtype, 1));
}

struct AttentionCase {
    std::uint64_t sequences, seq, heads, qk_dim, v_dim;
    std::uint64_t gap; ///< elements behind each head that belong to something else
};

void check_attention(Check& check, const OpRig& rig, DType dtype, const AttentionCase& c) {
    check.begin_case(std::to_string(c.sequences) + " x " + std::to_string(c.seq) + " tokens, " +
                     std::to_string(c.heads) + " heads of " + std::to_string(c.qk_dim) + " and " +
                     std::to_string(c.v_dim));
    const std::uint64_t tokens = c.sequences * c.seq;
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.qk_dim));
    const auto part = [&](std::uint64_t size, const std::vector<float>* values) {
        OpTensor whole = rig.result(dtype, {tokens, c.heads, size + c.gap});
        whole.view = ops::slice(whole.view, 2, 0, size);
        if (values != nullptr)
            rig.write(whole.view, *values);
        return whole;
    };
    const auto q = OpRig::random(dtype, tokens * c.heads * c.qk_dim, 1, -2, 2);
    const auto k = OpRig::random(dtype, tokens * c.heads * c.qk_dim, 2, -2, 2);
    const auto v = OpRig::random(dtype, tokens * c.heads * c.v_dim, 3);
    const auto d_o = OpRig::random(dtype, tokens * c.heads * c.v_dim, 4);
    const OpTensor q_t = part(c.qk_dim, &q), k_t = part(c.qk_dim, &k), v_t = part(c.v_dim, &v),
                   d_o_t = part(c.v_dim, &d_o), o = part(c.v_dim, nullptr);
    const OpTensor dq = part(c.qk_dim, nullptr), dk = part(c.qk_dim, nullptr),
                   dv = part(c.v_dim, nullptr);
    const OpTensor lse = rig.result(DType::F32, {tokens, c.heads});
    const Buffer scratch = rig.workspace(ops::attention_dgrad_workspace_bytes(tokens, c.heads));
    const ops::AttentionOptions options{.seq = c.seq, .scale = scale};
    rig.run([&](Recording& recording) {
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
    const auto forward = reference::attention_forward(qd, kd, vd, shape);
    const auto gradients = reference::attention_input_grad(to_double(d_o), qd, kd, vd, shape);
    // Each element within one rounding to its storage and `error` of the largest expected value.
    const auto close = [&](const char* name, const OpTensor& actual,
                           const reference::Vector& expected, std::uint64_t size, double error) {
        double largest = 0;
        for (const double value : expected)
            largest = std::max(largest, std::abs(value));
        const double storage = dtype == DType::BF16 ? 1.01 * reference::kBf16Epsilon : 0;
        check.elements(name, rig.read(actual), expected, {tokens, c.heads, size},
                       reference::within(error * largest, storage));
    };
    // Scores up to about 8 carry an error of 1e-6, which exp makes a relative error of its weight.
    close("forward", o, forward.out, c.v_dim, 1e-5);
    // With o stored as bf16, delta = o . d_o carries its rounding, which dq and dk inherit.
    const double error = dtype == DType::BF16 ? 4 * reference::kBf16Epsilon : 3e-5;
    close("gradient of q", dq, gradients.dq, c.qk_dim, error);
    close("gradient of k", dk, gradients.dk, c.qk_dim, error);
    close("gradient of v", dv, gradients.dv, c.v_dim, 3e-5);
}

} // namespace

void add_attention_checks(std::vector<OpCheck>& checks) {
    for (const DType dtype : {DType::F32, DType::BF16}) {
        checks.push_back(
            {"ops", with_storage("rope", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_rope(check, rig, dtype, {1, 1, 0, 4, 1, 0});
                 check_rope(check, rig, dtype, {7, 3, 8, 12, 7, 0});
                 check_rope(check, rig, dtype, {30, 2, 4, 64, 10, 5});
                 check_rope(check, rig, dtype, {9, 5, 128, 64, 9, 1000});
             }});
        checks.push_back(
            {"ops", with_storage("mla keys", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_keys(check, rig, dtype, 1, 1, 4, 4);
                 check_keys(check, rig, dtype, 9, 3, 8, 12);
                 check_keys(check, rig, dtype, 130, 4, 32, 16);
             }});
        checks.push_back(
            {"ops", with_storage("copy", dtype),
             [dtype](Check& check, const OpRig& rig) { check_copy(check, rig, dtype); }});
        checks.push_back(
            {"ops", with_storage("attention", dtype), [dtype](Check& check, const OpRig& rig) {
                 check_attention(check, rig, dtype, {3, 1, 1, 4, 4, 0});
                 check_attention(check, rig, dtype, {2, 33, 3, 16, 8, 0});
                 check_attention(check, rig, dtype, {1, 7, 2, 12, 20, 4});
                 check_attention(check, rig, dtype, {1, 100, 2, 48, 32, 0});
                 check_attention(check, rig, dtype, {1, 37, 2, 192, 128, 0});
             }});
    }
}

} // namespace bellows::selftest
