// SPDX-License-Identifier: MIT
// Causal attention with its gradients, on parts of wider tensors.
#include "verify/checks/families.hpp"

#include "verify/reference/ops.hpp"

#include <bellows/engine/attention.hpp>
#include <bellows/engine/gemm_plan.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct AttentionCase {
    std::uint64_t sequences, seq, heads, qk_dim, v_dim;
    std::uint64_t gap; ///< elements behind each head that belong to something else
    Depth depth = Depth::Quick;
    std::uint64_t of_keys = 0;  ///< heads of keys and values; 0: heads
    std::uint64_t document = 0; ///< tokens of a document, about; 0: sequences are documents

    std::uint64_t kv_heads() const { return of_keys == 0 ? heads : of_keys; }
};

constexpr auto kAttentionCases = std::to_array<AttentionCase>({
    {3, 1, 1, 4, 4, 0},
    {2, 33, 3, 16, 8, 0},
    {1, 7, 2, 12, 20, 4},
    {2, 70, 2, 16, 8, 8}, // on matrix units of CPUs, too: several blocks, parts of wider tensors
    {1, 100, 2, 48, 32, 0},
    {1, 150, 2, 64, 32, 16},
    {1, 37, 2, 192, 128, 0},
    {2, 33, 4, 16, 16, 0, Depth::Quick, 2},
    {2, 70, 6, 16, 8, 8, Depth::Quick, 2},      // on matrix units of CPUs, too
    {2, 200, 2, 16, 8, 8, Depth::Quick, 0, 60}, // whole tiles are left out
    {1, 70, 4, 16, 8, 0, Depth::Full, 2, 9},
    {1, 37, 4, 128, 128, 0, Depth::Full, 1},
    {1, 100, 6, 6, 10, 2, Depth::Full, 2},
    {2, 10, 2, 5, 3, 1, Depth::Full},
    {1, 19, 2, 6, 10, 2, Depth::Full},
    {1, 37, 2, 72, 96, 8, Depth::Full},
});

/// Of each token the first one of its document in the sequence and the one behind its last. Lengths
/// are in turn half and one and a half of that of the case, and 1.
std::vector<std::uint32_t> documents_of(const AttentionCase& c) {
    std::vector<std::uint32_t> ends;
    for (std::uint64_t sequence = 0; sequence < c.sequences; ++sequence)
        for (std::uint64_t begin = 0, i = sequence; begin < c.seq; ++i) {
            const std::uint64_t lengths[] = {c.document / 2, c.document * 3 / 2, 1};
            const std::uint64_t length = c.document == 0 ? c.seq : lengths[i % 3];
            const std::uint64_t end = std::min(begin + length, c.seq);
            for (std::uint64_t token = begin; token < end; ++token) {
                ends.push_back(static_cast<std::uint32_t>(begin));
                ends.push_back(static_cast<std::uint32_t>(end));
            }
            begin = end;
        }
    return ends;
}

/// [batch, heads, queries] as [tokens, heads].
reference::Vector by_token(const reference::Vector& by_head, const AttentionCase& c) {
    reference::Vector values;
    for (std::uint64_t t = 0; t < c.sequences * c.seq; ++t)
        for (std::uint64_t h = 0; h < c.heads; ++h)
            values.push_back(by_head[(t / c.seq * c.heads + h) * c.seq + t % c.seq]);
    return values;
}

void check_attention(Check& check, const OpRig& rig, DType dtype, const AttentionCase& c) {
    check.begin_case(std::to_string(c.sequences) + " x " + std::to_string(c.seq) + " tokens, " +
                     std::to_string(c.heads) + " heads (" + std::to_string(c.kv_heads()) +
                     " of keys) of " + std::to_string(c.qk_dim) + " and " +
                     std::to_string(c.v_dim) +
                     (c.document > 0 ? ", documents of " + std::to_string(c.document) : ""));
    const std::uint64_t tokens = c.sequences * c.seq;
    const float scale = 1.0f / std::sqrt(static_cast<float>(c.qk_dim));
    const std::uint64_t kv_heads = c.kv_heads();
    const auto part = [&](std::uint64_t heads, std::uint64_t size,
                          const std::vector<float>* values) {
        OpTensor tensor = rig.head(dtype, {tokens, heads, size + c.gap}, size);
        if (values != nullptr)
            rig.write(tensor.view, *values);
        return tensor;
    };
    const auto q = OpRig::random(dtype, tokens * c.heads * c.qk_dim, 1, -2, 2);
    const auto k = OpRig::random(dtype, tokens * kv_heads * c.qk_dim, 2, -2, 2);
    const auto v = OpRig::random(dtype, tokens * kv_heads * c.v_dim, 3);
    const auto d_o = OpRig::random(dtype, tokens * c.heads * c.v_dim, 4);
    const OpTensor q_t = part(c.heads, c.qk_dim, &q), k_t = part(kv_heads, c.qk_dim, &k),
                   v_t = part(kv_heads, c.v_dim, &v), d_o_t = part(c.heads, c.v_dim, &d_o),
                   o = part(c.heads, c.v_dim, nullptr);
    const OpTensor dq = part(c.heads, c.qk_dim, nullptr), dk = part(kv_heads, c.qk_dim, nullptr),
                   dv = part(kv_heads, c.v_dim, nullptr);
    const OpTensor lse = rig.result(DType::F32, {tokens, c.heads});
    const Buffer scratch = rig.workspace(ops::attention_dgrad_workspace_bytes(tokens, c.heads));
    ops::AttentionOptions options{.seq = c.seq, .scale = scale};
    const std::vector<std::uint32_t> ends = documents_of(c);
    const OpTensor documents = rig.tensor(DType::U32, {tokens, 2}, ends);
    if (c.document > 0)
        options.documents = documents;
    rig.run([&](Recording& recording) {
        ops::attention_forward(recording, q_t, k_t, v_t, o, lse, options);
        ops::attention_dgrad(recording, d_o_t, q_t, k_t, v_t, o, lse,
                             {.dq = dq.view, .dk = dk.view, .dv = dv.view}, options,
                             scratch.view());
    });
    reference::AttentionShape shape{.batch = c.sequences,
                                    .queries = c.seq,
                                    .keys = c.seq,
                                    .heads = c.heads,
                                    .qk_dim = c.qk_dim,
                                    .v_dim = c.v_dim,
                                    .scale = scale,
                                    .kv_heads = c.kv_heads()};
    for (std::size_t i = 0; c.document > 0 && i < ends.size(); i += 2)
        shape.begins.push_back(ends[i]);
    const auto qd = to_double(q), kd = to_double(k), vd = to_double(v);
    const auto forward = reference::attention_forward(qd, kd, vd, shape);
    const auto gradients = reference::attention_input_grad(to_double(d_o), qd, kd, vd, shape);
    // Each element within one rounding to its storage and `error` of the largest expected value.
    const auto close = [&](const char* name, const OpTensor& actual,
                           const reference::Vector& expected, std::uint64_t heads,
                           std::uint64_t size, double error) {
        double largest = 0;
        for (const double value : expected)
            largest = std::max(largest, std::abs(value));
        const double storage = dtype == DType::BF16 ? 1.01 * reference::kBf16Epsilon : 0;
        check.elements(name, rig.read(actual), expected, {tokens, heads, size},
                       reference::within(error * largest, storage));
        check.untouched(name, rig.outside(actual));
    };
    // On matrix units weights are rounded to the elements of matrices, those of the gradients, too.
    const GemmClass::Units units =
        dtype == DType::BF16 ? gemm_class(rig.device()).units : GemmClass::Units::None;
    const double weight = units == GemmClass::Units::None   ? 0
                          : units == GemmClass::Units::BF16 ? reference::kBf16Epsilon
                                                            : reference::kBf16Epsilon / 8;
    check.elements("log of the sum", rig.read(lse), by_token(forward.lse, c), {tokens, c.heads},
                   reference::within(1e-5, 0));
    // Scores up to about 8 carry an error of 1e-6, which exp makes a relative error of its weight.
    close("forward", o, forward.out, c.heads, c.v_dim, 1e-5 + weight);
    // With o stored as bf16, delta = o . d_o carries its rounding, which dq and dk inherit.
    const double error = dtype == DType::BF16 ? 4 * reference::kBf16Epsilon + 4 * weight : 3e-5;
    close("gradient of q", dq, gradients.dq, c.heads, c.qk_dim, error);
    close("gradient of k", dk, gradients.dk, kv_heads, c.qk_dim, error);
    close("gradient of v", dv, gradients.dv, kv_heads, c.v_dim, 3e-5 + 2 * weight);
}

} // namespace

void add_attention_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_table(checks, depth, "attention", kAttentionCases, check_attention);
    checks.back().depends_on_gemm_class = true; // of bf16
}

} // namespace bellows::checks
