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

struct HeadSizes {
    std::uint64_t heads, kv_heads, qk, value;
};

/// What verifies the results, and the heads' sizes.
struct AttentionTensors {
    TensorView q, k, v, o, lse, d_o, dq, dk, dv;
    HeadSizes heads;
    ops::AttentionOptions options;
    std::uint64_t document; ///< tokens of the first one
};

double dot(const std::vector<double>& a, std::uint64_t at_a, const std::vector<double>& b,
           std::uint64_t at_b, std::uint64_t count) {
    double sum = 0;
    for (std::uint64_t i = 0; i < count; ++i)
        sum += a[at_a + i] * b[at_b + i];
    return sum;
}

/// The second token's first head sees two keys only: its output, its lse and its query's gradient.
/// The first key's gradients come from every query of its document.
std::string check_attention(const OpData& data, const AttentionTensors& a, DType act,
                            bool gradients) {
    const auto [heads, kv, qk, value] = a.heads;
    const auto q = data.read(a.q), k = data.read(a.k), v = data.read(a.v), o = data.read(a.o),
               lse = data.read(a.lse);
    const double scale = a.options.scale;
    const double s0 = scale * dot(q, heads * qk, k, 0, qk),
                 s1 = scale * dot(q, heads * qk, k, kv * qk, qk);
    const double p = sigmoid(s1 - s0);
    const std::uint64_t second = heads * value; // its first head's output
    std::string wrong = compare("lse", 1, lse[heads], s0 + std::log1p(std::exp(s1 - s0)), 1e-2);
    for (const std::uint64_t i : samples(value))
        wrong +=
            compare("o", i, o[second + i], (1 - p) * v[i] + p * v[kv * value + i], tolerance(act));
    if (!gradients)
        return wrong;
    const auto d_o = data.read(a.d_o), dq = data.read(a.dq), dk = data.read(a.dk),
               dv = data.read(a.dv);
    const double ds =
        p * (1 - p) * (dot(d_o, second, v, kv * value, value) - dot(d_o, second, v, 0, value));
    for (const std::uint64_t i : samples(qk))
        wrong += compare("dq", i, dq[heads * qk + i], scale * ds * (k[kv * qk + i] - k[i]),
                         tolerance(act));
    std::vector<double> key(qk, 0), values(value, 0);
    for (std::uint64_t t = 0; t < a.document; ++t)
        for (std::uint64_t h = 0; h < heads / kv; ++h) {
            const std::uint64_t row = t * heads + h;
            const double weight = std::exp(scale * dot(q, row * qk, k, 0, qk) - lse[row]);
            const double of_score = weight * (dot(d_o, row * value, v, 0, value) -
                                              dot(d_o, row * value, o, row * value, value));
            for (std::uint64_t i = 0; i < qk; ++i)
                key[i] += scale * of_score * q[row * qk + i];
            for (std::uint64_t i = 0; i < value; ++i)
                values[i] += weight * d_o[row * value + i];
        }
    for (const std::uint64_t i : samples(qk))
        wrong += compare("dk", i, dk[i], key[i], tolerance(act));
    for (const std::uint64_t i : samples(value))
        wrong += compare("dv", i, dv[i], values[i], tolerance(act));
    return wrong;
}

/// Returns documents of that length, which divides the length of the sequences.
TensorView documents_of(OpData& data, const Sizes& s, std::uint64_t length) {
    std::vector<std::uint32_t> ends;
    for (std::uint64_t token = 0; token < s.tokens; ++token) {
        const std::uint64_t begin = token % s.seq / length * length;
        ends.push_back(static_cast<std::uint32_t>(begin));
        ends.push_back(static_cast<std::uint32_t>(begin + length));
    }
    const TensorView documents = data.empty(DType::U32, {s.tokens, 2});
    data.device().upload(documents.buffer.sub(0, ends.size() * 4),
                         std::span<const std::uint32_t>(ends));
    return documents;
}

/// documents: in each sequence.
Workload attention_of(OpData& data, const Sizes& s, DType act, int part, const HeadSizes& sizes,
                      std::uint64_t documents = 1) {
    const auto [heads, kv, qk, value] = sizes;
    const TensorView q = data.random(act, {s.tokens, heads, qk}),
                     k = data.random(act, {s.tokens, kv, qk}),
                     v = data.random(act, {s.tokens, kv, value}),
                     d_o = data.random(act, {s.tokens, heads, value}),
                     o = data.empty(act, {s.tokens, heads, value}),
                     dq = data.empty(act, {s.tokens, heads, qk}),
                     dk = data.empty(act, {s.tokens, kv, qk}),
                     dv = data.empty(act, {s.tokens, kv, value}),
                     lse = data.empty(DType::F32, {s.tokens, heads});
    const BufferView scratch = data.bytes(ops::attention_dgrad_workspace_bytes(s.tokens, heads));
    ops::AttentionOptions options{.seq = s.seq, .scale = 1 / std::sqrt(static_cast<float>(qk))};
    const std::uint64_t length = s.seq / documents;
    if (documents > 1)
        options.documents = documents_of(data, s, length);
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::attention_forward(recording, q, k, v, o, lse, options);
    data.device().submit(recording).wait();
    const AttentionTensors all{q, k, v, o, lse, d_o, dq, dk, dv, sizes, options, length};
    const auto verify = [=, &data] { return check_attention(data, all, act, part == 1); };
    const double pairs =
        static_cast<double>(s.tokens * heads) * static_cast<double>(length + 1) / 2;
    const double flops = 2 * pairs * static_cast<double>(qk + value);
    if (part == 0)
        return {[=](Recording& r) { ops::attention_forward(r, q, k, v, o, lse, options); }, verify,
                bytes_of({q, k, v, o}), flops};
    return {[=](Recording& r) {
                ops::attention_dgrad(r, d_o, q, k, v, o, lse, {.dq = dq, .dk = dk, .dv = dv},
                                     options, scratch);
            },
            verify, bytes_of({q, k, v, o, d_o, dq, dk, dv}), 2.5 * flops};
}

Workload grouped(OpData& data, const Sizes& s, DType act, int part, std::uint64_t group) {
    return attention_of(data, s, act, part,
                        {s.grouped_heads, s.grouped_heads / group, s.grouped_size, s.grouped_size});
}

} // namespace

Workload attention(OpData& data, const Sizes& s, DType act, int part) {
    return attention_of(data, s, act, part, {s.heads, s.heads, s.nope + s.rope, s.value});
}

Workload packed_attention(OpData& data, const Sizes& s, DType act, int part) {
    return attention_of(data, s, act, part, {s.heads, s.heads, s.nope + s.rope, s.value}, 4);
}

Workload grouped_attention_4(OpData& data, const Sizes& s, DType act, int part) {
    return grouped(data, s, act, part, 4);
}

Workload grouped_attention_8(OpData& data, const Sizes& s, DType act, int part) {
    return grouped(data, s, act, part, 8);
}

} // namespace bellows::bench
