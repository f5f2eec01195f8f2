// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

#include <bellows/engine/attention.hpp>

namespace bellows::bench {

Workload rope(OpData& data, const Sizes& s, DType act, int part) {
    const TensorView q = data.random(act, {s.tokens, s.heads, s.nope + s.rope}),
                     table =
                         data.values({s.seq, s.rope / 2, 2},
                                     ops::rope_table(s.seq, std::vector<double>(s.rope / 2, 1.0))),
                     y = data.empty(act, {s.tokens, s.heads, s.rope});
    const TensorView rotated = ops::slice(q, 2, s.nope, s.rope);
    // Pairs turn by one radian per position, backward in the gradient.
    const auto verify = [=, &data]() -> std::string {
        const auto from = data.read(q), to = data.read(y);
        for (const std::uint64_t t : samples(s.tokens)) {
            const double angle = static_cast<double>(t % s.seq) * (part == 0 ? 1 : -1);
            const std::uint64_t i = t * s.heads * (s.nope + s.rope) + s.nope;
            const double expected = from[i] * std::cos(angle) - from[i + 1] * std::sin(angle);
            const std::string wrong =
                compare("y", t, to[t * s.heads * s.rope], expected, tolerance(act));
            if (!wrong.empty()) {
                return wrong;
            }
        }
        return "";
    };
    if (part == 0)
        return {[=](Recording& r) { ops::rope_forward(r, rotated, table, y, s.seq); }, verify,
                2 * bytes_of({y}), 0};
    return {[=](Recording& r) { ops::rope_dgrad(r, rotated, table, y, s.seq); }, verify,
            2 * bytes_of({y}), 0};
}

Workload mla_keys(OpData& data, const Sizes& s, DType act, int part) {
    const TensorView kv_up = data.random(act, {s.tokens, s.heads, s.nope + s.value}),
                     k_rope = data.random(act, {s.tokens, s.rope}),
                     keys = data.random(act, {s.tokens, s.heads, s.nope + s.rope}),
                     d_kv_up = data.empty(act, {s.tokens, s.heads, s.nope + s.value}),
                     d_k_rope = data.empty(act, {s.tokens, s.rope});
    const auto verify = [=, &data]() -> std::string {
        const auto all = data.read(keys), shared = data.read(k_rope), sums = data.read(d_k_rope);
        for (const std::uint64_t t : samples(s.tokens)) {
            double sum = 0;
            for (std::uint64_t h = 0; h < s.heads; ++h) {
                const double key = all[(t * s.heads + h) * (s.nope + s.rope) + s.nope];
                sum += key;
                if (part == 0 && key != shared[t * s.rope]) {
                    return "key " + std::to_string(t) + " is not the shared one";
                }
            }
            if (part == 1) {
                const std::string wrong =
                    compare("d_k_rope", t, sums[t * s.rope], sum, tolerance(act));
                if (!wrong.empty()) {
                    return wrong;
                }
            }
        }
        return "";
    };
    if (part == 0) {
        return {[=](Recording& r) { ops::mla_keys_forward(r, kv_up, k_rope, keys); }, verify,
                2 * bytes_of({keys}), 0};
    }
    return {[=](Recording& r) { ops::mla_keys_dgrad(r, keys, d_kv_up, d_k_rope); }, verify,
            2 * bytes_of({keys}), 0};
}

namespace {

/// Each head of keys and values serves `group` heads of queries.
Workload attention_of(OpData& data, const Sizes& s, DType act, int part, std::uint64_t group) {
    const std::uint64_t qk = s.nope + s.rope, kv = s.heads / group;
    const TensorView q = data.random(act, {s.tokens, s.heads, qk}),
                     k = data.random(act, {s.tokens, kv, qk}),
                     v = data.random(act, {s.tokens, kv, s.value}),
                     d_o = data.random(act, {s.tokens, s.heads, s.value}),
                     o = data.empty(act, {s.tokens, s.heads, s.value}),
                     dq = data.empty(act, {s.tokens, s.heads, qk}),
                     dk = data.empty(act, {s.tokens, kv, qk}),
                     dv = data.empty(act, {s.tokens, kv, s.value}),
                     lse = data.empty(DType::F32, {s.tokens, s.heads});
    const BufferView scratch = data.bytes(ops::attention_dgrad_workspace_bytes(s.tokens, s.heads));
    const ops::AttentionOptions options{.seq = s.seq,
                                        .scale = 1 / std::sqrt(static_cast<float>(qk))};
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::attention_forward(recording, q, k, v, o, lse, options);
    data.device().submit(recording).wait();
    // The second token's first head sees two keys only, and the last token's dv comes from one
    // query of each head.
    const auto verify = [=, &data]() -> std::string {
        const auto qs = data.read(q), ks = data.read(k), vs = data.read(v), os = data.read(o);
        const auto dos = data.read(d_o), dvs = data.read(dv), lses = data.read(lse);
        double s0 = 0, s1 = 0;
        for (std::uint64_t d = 0; d < qk; ++d) {
            s0 += qs[s.heads * qk + d] * ks[d];
            s1 += qs[s.heads * qk + d] * ks[kv * qk + d];
        }
        const double p = sigmoid(options.scale * (s1 - s0));
        const double expected = (1 - p) * vs[0] + p * vs[kv * s.value];
        std::string wrong = compare("o", 1, os[s.heads * s.value], expected, tolerance(act));
        if (part == 1) {
            const std::uint64_t key = (s.seq - 1) * kv;
            double sum = 0;
            for (std::uint64_t last = (s.seq - 1) * s.heads, h = 0; h < group; ++last, ++h) {
                double score = 0;
                for (std::uint64_t d = 0; d < qk; ++d) {
                    score += qs[last * qk + d] * ks[key * qk + d];
                }
                sum += std::exp(options.scale * score - lses[last]) * dos[last * s.value];
            }
            wrong += compare("dv", key, dvs[key * s.value], sum, tolerance(act));
        }
        return wrong;
    };
    const double pairs =
        static_cast<double>(s.tokens * s.heads) * static_cast<double>(s.seq + 1) / 2;
    const double flops = 2 * pairs * static_cast<double>(qk + s.value);
    if (part == 0) {
        return {[=](Recording& r) { ops::attention_forward(r, q, k, v, o, lse, options); }, verify,
                bytes_of({q, k, v, o}), flops};
    }
    return {[=](Recording& r) {
                ops::attention_dgrad(r, d_o, q, k, v, o, lse, {.dq = dq, .dk = dk, .dv = dv},
                                     options, scratch);
            },
            verify, bytes_of({q, k, v, o, d_o, dq, dk, dv}), 2.5 * flops};
}

} // namespace

Workload attention(OpData& data, const Sizes& s, DType act, int part) {
    return attention_of(data, s, act, part, 1);
}

Workload grouped_attention(OpData& data, const Sizes& s, DType act, int part) {
    return attention_of(data, s, act, part, s.heads % 4 == 0 ? 4 : 1);
}

} // namespace bellows::bench
