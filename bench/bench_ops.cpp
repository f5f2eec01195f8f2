// SPDX-License-Identifier: MIT
// Every dense op but GEMM: checks samples of its result against f64, then times it. Sizes are those
// of one layer of the demo model on CPU drivers, of v2-lite elsewhere. Options: Google Benchmark's.
// GB/s counts each tensor once, read or written.

#include "support/op_bench.hpp"

#include <bellows/engine/attention.hpp>

#include <algorithm>
#include <iostream>
#include <memory>
#include <numeric>

namespace bellows::bench {
namespace {

struct Sizes {
    std::uint64_t tokens, seq, hidden, ffn, heads, nope, rope, value, vocab, experts, top_k;
};

Sizes sizes_for(const Device& device) {
    if (device.info().is_cpu) {
        return {1024, 256, 512, 512, 8, 32, 16, 32, 4096, 16, 4};
    }
    return {8192, 4096, 2048, 1408, 16, 128, 64, 128, 102400, 64, 6};
}

double tolerance(DType dtype) {
    return dtype == DType::BF16 ? 8e-3 : 1e-4;
}

double bytes_of(std::initializer_list<TensorView> views) {
    double bytes = 0;
    for (const TensorView& view : views) {
        bytes += static_cast<double>(view.num_bytes());
    }
    return bytes;
}

double sigmoid(double x) {
    return 1 / (1 + std::exp(-x));
}

/// First, middle and last of `count`.
std::vector<std::uint64_t> samples(std::uint64_t count) {
    return {0, count / 2, count - 1};
}

Workload rmsnorm(OpData& data, const Sizes& s, DType act, int part) {
    const TensorView x = data.random(act, {s.tokens, s.hidden}),
                     dy = data.random(act, {s.tokens, s.hidden}),
                     gain = data.random(DType::F32, {s.hidden}, 0.5, 1.5),
                     y = data.empty(act, {s.tokens, s.hidden}),
                     dx = data.empty(act, {s.tokens, s.hidden}),
                     inv_rms = data.empty(DType::F32, {s.tokens}),
                     d_gain = data.empty(DType::F32, {s.hidden});
    const BufferView scratch = data.bytes(ops::rmsnorm_wgrad_workspace_bytes(s.tokens, s.hidden));
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::rmsnorm_forward(recording, x, gain, y, inv_rms, 1e-6f);
    data.device().submit(recording).wait();
    const auto verify = [=, &data]() -> std::string {
        const auto xs = data.read(x), ys = data.read(y), gains = data.read(gain);
        const auto dys = data.read(dy), dxs = data.read(dx), d_gains = data.read(d_gain);
        const auto inverse = data.read(inv_rms);
        for (const std::uint64_t row : samples(s.tokens)) {
            double squares = 0, dot = 0;
            for (std::uint64_t c = 0; c < s.hidden; ++c) {
                const std::uint64_t i = row * s.hidden + c;
                squares += xs[i] * xs[i];
                dot += xs[i] * dys[i] * gains[c];
            }
            const double inv = 1 / std::sqrt(squares / static_cast<double>(s.hidden) + 1e-6);
            for (const std::uint64_t c : samples(s.hidden)) {
                const std::uint64_t i = row * s.hidden + c;
                const double mean = dot / static_cast<double>(s.hidden);
                std::string wrong = compare("y", i, ys[i], xs[i] * inv * gains[c], tolerance(act));
                if (part == 1) {
                    wrong += compare("dx", i, dxs[i],
                                     inv * dys[i] * gains[c] - xs[i] * inv * inv * inv * mean,
                                     tolerance(act));
                }
                if (!wrong.empty()) {
                    return wrong;
                }
            }
        }
        double sum = 0;
        for (std::uint64_t row = 0; row < s.tokens; ++row) {
            sum += dys[row * s.hidden] * xs[row * s.hidden] * inverse[row];
        }
        return part == 2 ? compare("d_gain", 0, d_gains[0], sum, 1e-4) : "";
    };
    const Workload work[] = {
        {[=](Recording& r) { ops::rmsnorm_forward(r, x, gain, y, inv_rms, 1e-6f); }, verify,
         bytes_of({x, y}), 0},
        {[=](Recording& r) { ops::rmsnorm_dgrad(r, dy, x, gain, inv_rms, dx, false); }, verify,
         bytes_of({x, dy, dx}), 0},
        {[=](Recording& r) { ops::rmsnorm_wgrad(r, dy, x, inv_rms, d_gain, false, scratch); },
         verify, bytes_of({x, dy}), 0},
    };
    return work[part];
}

Workload swiglu(OpData& data, const Sizes& s, DType act, int part) {
    const TensorView gate_up = data.random(act, {s.tokens, 2 * s.ffn}, -4, 4),
                     weight = data.random(DType::F32, {s.tokens}, 0, 1),
                     d_hidden = data.random(act, {s.tokens, s.ffn}),
                     hidden = data.empty(act, {s.tokens, s.ffn}),
                     d_gate_up = data.empty(act, {s.tokens, 2 * s.ffn}),
                     d_weight = data.empty(DType::F32, {s.tokens});
    const auto verify = [=, &data]() -> std::string {
        const auto x = data.read(gate_up), w = data.read(weight), dy = data.read(d_hidden);
        const auto y = data.read(hidden), dx = data.read(d_gate_up);
        for (const std::uint64_t row : samples(s.tokens)) {
            for (const std::uint64_t c : samples(s.ffn)) {
                const double g = x[row * 2 * s.ffn + c], u = x[row * 2 * s.ffn + s.ffn + c];
                const std::uint64_t i = row * s.ffn + c;
                const double d_gate = dy[i] * w[row] * u * sigmoid(g) * (1 + g * (1 - sigmoid(g)));
                const std::string wrong =
                    part == 0
                        ? compare("hidden", i, y[i], g * sigmoid(g) * u * w[row], tolerance(act))
                        : compare("d_gate", i, dx[row * 2 * s.ffn + c], d_gate, tolerance(act));
                if (!wrong.empty()) {
                    return wrong;
                }
            }
        }
        return "";
    };
    if (part == 0) {
        return {[=](Recording& r) { ops::swiglu_forward(r, gate_up, weight, hidden); }, verify,
                bytes_of({gate_up, hidden}), 0};
    }
    return {
        [=](Recording& r) { ops::swiglu_dgrad(r, d_hidden, gate_up, weight, d_gate_up, d_weight); },
        verify, bytes_of({gate_up, d_gate_up, d_hidden}), 0};
}

Workload router(OpData& data, const Sizes& s, DType, int part) {
    const TensorView logits = data.random(DType::F32, {s.tokens, s.experts}, -3, 3),
                     scores = data.empty(DType::F32, {s.tokens, s.experts}),
                     ids = data.empty(DType::I32, {s.tokens, s.top_k}),
                     weights = data.empty(DType::F32, {s.tokens, s.top_k}),
                     d_weights = data.random(DType::F32, {s.tokens, s.top_k}),
                     d_logits = data.empty(DType::F32, {s.tokens, s.experts});
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::router_forward(recording, logits, {}, scores, ids, weights, {});
    data.device().submit(recording).wait();
    const auto verify = [=, &data]() -> std::string {
        const auto l = data.read(logits), w = data.read(weights), chosen = data.read(ids);
        const auto dw = data.read(d_weights), dl = data.read(d_logits);
        for (const std::uint64_t t : samples(s.tokens)) {
            const auto row = l.begin() + static_cast<std::ptrdiff_t>(t * s.experts);
            const auto best = static_cast<std::uint64_t>(
                std::max_element(row, row + static_cast<std::ptrdiff_t>(s.experts)) - row);
            if (static_cast<std::uint64_t>(chosen[t * s.top_k]) != best) {
                return "token " + std::to_string(t) + " chose another expert";
            }
            double sum = 0, inner = 0;
            for (std::uint64_t k = 0; k < s.top_k; ++k) {
                const double score =
                    sigmoid(row[static_cast<std::ptrdiff_t>(chosen[t * s.top_k + k])]);
                sum += score;
                inner += score * dw[t * s.top_k + k];
            }
            const double score = sigmoid(row[static_cast<std::ptrdiff_t>(best)]);
            const double d = (dw[t * s.top_k] - inner / sum) / sum * score * (1 - score);
            const std::string wrong =
                part == 0 ? compare("weight", t, w[t * s.top_k], score / sum, 1e-5)
                          : compare("d_logit", t, dl[t * s.experts + best], d, 1e-5);
            if (!wrong.empty()) {
                return wrong;
            }
        }
        return "";
    };
    if (part == 0) {
        return {[=](Recording& r) { ops::router_forward(r, logits, {}, scores, ids, weights, {}); },
                verify, bytes_of({logits, scores, ids, weights}), 0};
    }
    return {[=](Recording& r) { ops::router_dgrad(r, d_weights, ids, scores, d_logits, {}); },
            verify, bytes_of({d_weights, ids, scores, d_logits}), 0};
}

Workload moe(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint32_t alignment = 16;
    const std::uint64_t capacity = ops::moe_capacity(s.tokens, s.top_k, s.experts, alignment);
    const TensorView ids = data.indices(DType::I32, {s.tokens, s.top_k}, s.experts),
                     x = data.random(act, {s.tokens, s.hidden}),
                     weights = data.random(DType::F32, {s.tokens, s.top_k}, 0, 1),
                     rows = data.empty(act, {capacity, s.hidden}),
                     y = data.empty(act, {s.tokens, s.hidden}),
                     d_weights = data.empty(DType::F32, {s.tokens, s.top_k});
    const ops::MoeLayout layout{.counts = data.empty(DType::U32, {s.experts}),
                                .offsets = data.empty(DType::U32, {s.experts + 1}),
                                .row_to_slot = data.empty(DType::I32, {capacity}),
                                .slot_to_row = data.empty(DType::I32, {s.tokens, s.top_k}),
                                .alignment = alignment};
    const BufferView scratch =
        data.bytes(ops::moe_layout_workspace_bytes(s.tokens, s.top_k, s.experts));
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::moe_layout(recording, ids, layout, scratch);
    ops::moe_gather(recording, x, layout, {}, rows);
    data.device().submit(recording).wait();
    // Gathered and summed back with weights, a token is itself times the sum of its weights.
    const auto verify = [=, &data]() -> std::string {
        const auto chosen = data.read(ids), map = data.read(layout.slot_to_row);
        const auto first = data.read(layout.offsets), count = data.read(layout.counts);
        for (std::uint64_t slot = 0; slot < chosen.size(); ++slot) {
            const auto e = static_cast<std::uint64_t>(chosen[slot]);
            if (map[slot] < first[e] || map[slot] >= first[e] + count[e]) {
                return "slot " + std::to_string(slot) + " stands in row " +
                       std::to_string(map[slot]);
            }
        }
        const auto xs = data.read(x), ys = data.read(y), w = data.read(weights);
        const auto dw = data.read(d_weights);
        for (const std::uint64_t t : samples(s.tokens)) {
            double sum = 0, squares = 0;
            for (std::uint64_t k = 0; k < s.top_k; ++k) {
                sum += w[t * s.top_k + k];
            }
            for (std::uint64_t c = 0; c < s.hidden; ++c) {
                squares += xs[t * s.hidden + c] * xs[t * s.hidden + c];
            }
            std::string wrong;
            if (part == 2) {
                wrong = compare("y", t, ys[t * s.hidden], sum * xs[t * s.hidden], tolerance(act));
            } else if (part == 3) {
                wrong = compare("d_weight", t, dw[t * s.top_k], squares, tolerance(act));
            }
            if (!wrong.empty()) {
                return wrong;
            }
        }
        return "";
    };
    const double moved = static_cast<double>(s.tokens * s.top_k * s.hidden * size_of(act));
    const Workload work[] = {
        {[=](Recording& r) { ops::moe_layout(r, ids, layout, scratch); }, verify,
         bytes_of({ids, layout.slot_to_row, layout.row_to_slot}), 0},
        {[=](Recording& r) { ops::moe_gather(r, x, layout, {}, rows); }, verify, 2 * moved, 0},
        {[=](Recording& r) { ops::moe_unpermute(r, rows, layout, weights, y, false); }, verify,
         moved + bytes_of({y}), 0},
        {[=](Recording& r) { ops::moe_weights_dgrad(r, rows, layout, x, d_weights); }, verify,
         2 * moved, 0},
    };
    return work[part];
}

Workload rope(OpData& data, const Sizes& s, DType act, int) {
    const TensorView q = data.random(act, {s.tokens, s.heads, s.nope + s.rope}),
                     table =
                         data.values({s.seq, s.rope / 2, 2}, ops::rope_table(s.seq, s.rope, 10000)),
                     y = data.empty(act, {s.tokens, s.heads, s.rope});
    const TensorView part = ops::slice(q, 2, s.nope, s.rope);
    const auto verify = [=, &data]() -> std::string {
        const auto from = data.read(q), to = data.read(y);
        for (const std::uint64_t t : samples(s.tokens)) {
            const double angle = static_cast<double>(t % s.seq);
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
    return {[=](Recording& r) { ops::rope_forward(r, part, table, y, s.seq); }, verify,
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

Workload attention(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint64_t qk = s.nope + s.rope;
    const TensorView q = data.random(act, {s.tokens, s.heads, qk}),
                     k = data.random(act, {s.tokens, s.heads, qk}),
                     v = data.random(act, {s.tokens, s.heads, s.value}),
                     d_o = data.random(act, {s.tokens, s.heads, s.value}),
                     o = data.empty(act, {s.tokens, s.heads, s.value}),
                     dq = data.empty(act, {s.tokens, s.heads, qk}),
                     dk = data.empty(act, {s.tokens, s.heads, qk}),
                     dv = data.empty(act, {s.tokens, s.heads, s.value}),
                     lse = data.empty(DType::F32, {s.tokens, s.heads});
    const BufferView scratch = data.bytes(ops::attention_dgrad_workspace_bytes(s.tokens, s.heads));
    const ops::AttentionOptions options{.seq = s.seq,
                                        .scale = 1 / std::sqrt(static_cast<float>(qk))};
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::attention_forward(recording, q, k, v, o, lse, options);
    data.device().submit(recording).wait();
    // Of the second token's first head: two keys only. dv of the last token: one query only.
    const auto verify = [=, &data]() -> std::string {
        const auto qs = data.read(q), ks = data.read(k), vs = data.read(v), os = data.read(o);
        const auto dos = data.read(d_o), dvs = data.read(dv), lses = data.read(lse);
        double s0 = 0, s1 = 0;
        for (std::uint64_t d = 0; d < qk; ++d) {
            s0 += qs[s.heads * qk + d] * ks[d];
            s1 += qs[s.heads * qk + d] * ks[s.heads * qk + d];
        }
        const double p = sigmoid(options.scale * (s1 - s0));
        const double expected = (1 - p) * vs[0] + p * vs[s.heads * s.value];
        std::string wrong = compare("o", 1, os[s.heads * s.value], expected, tolerance(act));
        if (part == 1) {
            const std::uint64_t last = (s.seq - 1) * s.heads;
            double score = 0;
            for (std::uint64_t d = 0; d < qk; ++d) {
                score += qs[last * qk + d] * ks[last * qk + d];
            }
            const double weight = std::exp(options.scale * score - lses[last]);
            wrong += compare("dv", last, dvs[last * s.value], weight * dos[last * s.value],
                             tolerance(act));
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

Workload embedding(OpData& data, const Sizes& s, DType act, int part) {
    const TensorView ids = data.indices(DType::U32, {s.tokens}, s.vocab),
                     table = data.random(DType::F32, {s.vocab, s.hidden}),
                     embedded = data.random(act, {s.tokens, s.hidden}),
                     d_table = data.empty(DType::F32, {s.vocab, s.hidden});
    const BufferView scratch = data.bytes(ops::embedding_wgrad_workspace_bytes(s.tokens));
    const auto verify = [=, &data]() -> std::string {
        const auto id = data.read(ids), out = data.read(embedded);
        const auto rows = data.read(part == 0 ? table : d_table);
        for (const std::uint64_t t : samples(s.tokens)) {
            double expected = 0;
            const std::uint64_t at = static_cast<std::uint64_t>(id[t]) * s.hidden;
            for (std::uint64_t u = 0; u < s.tokens; ++u) {
                expected += id[u] == id[t] ? out[u * s.hidden] : 0;
            }
            const std::string wrong =
                part == 0 ? compare("embedded", t, out[t * s.hidden], rows[at], tolerance(act))
                          : compare("d_table", t, rows[at], expected, 1e-4);
            if (!wrong.empty()) {
                return wrong;
            }
        }
        return "";
    };
    if (part == 0) {
        return {[=](Recording& r) { ops::embedding_forward(r, ids, table, embedded); }, verify,
                2 * bytes_of({embedded}), 0};
    }
    return {[=](Recording& r) { ops::embedding_wgrad(r, ids, embedded, d_table, false, scratch); },
            verify, bytes_of({embedded, d_table}), 0};
}

Workload cross_entropy(OpData& data, const Sizes& s, DType act, int) {
    const TensorView logits = data.random(act, {s.tokens, s.vocab}, -4, 4),
                     d_logits = data.empty(act, {s.tokens, s.vocab}),
                     targets = data.indices(DType::U32, {s.tokens}, s.vocab),
                     loss = data.empty(DType::F32, {s.tokens});
    const auto verify = [=, &data]() -> std::string {
        const auto l = data.read(logits), target = data.read(targets), losses = data.read(loss);
        for (const std::uint64_t t : samples(s.tokens)) {
            double sum = 0;
            for (std::uint64_t c = 0; c < s.vocab; ++c) {
                sum += std::exp(l[t * s.vocab + c]);
            }
            const double expected =
                std::log(sum) - l[t * s.vocab + static_cast<std::uint64_t>(target[t])];
            const std::string wrong = compare("loss", t, losses[t], expected, 1e-4);
            if (!wrong.empty()) {
                return wrong;
            }
        }
        return "";
    };
    return {[=](Recording& r) { ops::cross_entropy(r, logits, targets, loss, d_logits, 1); },
            verify, bytes_of({logits, d_logits}), 0};
}

Workload elementwise(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint64_t count = s.tokens * s.hidden;
    const DType other = act == DType::F32 ? DType::BF16 : DType::F32;
    const TensorView a = data.random(act, {count}), b = data.random(act, {count}),
                     y = data.empty(act, {count}), converted = data.empty(other, {count}),
                     partials = data.empty(DType::F32, {ops::num_partials(count)}),
                     sum = data.empty(DType::F32, {2});
    const BufferView scratch = data.bytes(ops::sum_pairs_workspace_bytes(partials.extent[0]));
    const auto verify = [=, &data]() -> std::string {
        const auto as = data.read(a), bs = data.read(b), ys = data.read(y);
        const auto casts = data.read(converted), sums = data.read(sum);
        for (const std::uint64_t i : samples(count)) {
            const std::string wrong = part == 0
                                          ? compare("y", i, ys[i], as[i] + bs[i], tolerance(act))
                                      : part == 1 ? compare("cast", i, casts[i], as[i], 8e-3)
                                                  : "";
            if (!wrong.empty()) {
                return wrong;
            }
        }
        const double expected = std::inner_product(as.begin(), as.end(), as.begin(), 0.0);
        return part == 2 ? compare("sum", 0, sums[0] + sums[1], expected, 1e-5) : "";
    };
    const Workload work[] = {
        {[=](Recording& r) { ops::add(r, a, b, y); }, verify, bytes_of({a, b, y}), 0},
        {[=](Recording& r) { ops::cast(r, a, converted); }, verify, bytes_of({a, converted}), 0},
        {[=](Recording& r) {
             ops::sum_squares_partials(r, a, partials);
             ops::sum_pairs(r, partials, sum, scratch);
         },
         verify, bytes_of({a}), 0},
    };
    return work[part];
}

Workload adamw(OpData& data, const Sizes& s, DType moments, int) {
    const std::uint64_t count = s.hidden * s.hidden * 4;
    const TensorView weight = data.random(DType::F32, {count}),
                     gradient = data.random(DType::F32, {count}, 0.5, 1),
                     m = data.random(moments, {count}, 0, 0),
                     v = data.random(moments, {count}, 0, 0),
                     copy = data.empty(DType::BF16, {count});
    const ops::AdamwOptions options{.weight_decay = 0};
    const auto numbers = ops::adamw_scalars(options, 1e-3, 1);
    const TensorView scalars = data.values({3}, {numbers.begin(), numbers.end()});
    const double before = data.read(weight)[0];
    // The first step of every element is lr downhill.
    const auto verify = [=, &data]() -> std::string {
        return compare("weight", 0, data.read(weight)[0], before - 1e-3, 1e-6);
    };
    return {
        [=](Recording& r) { ops::adamw(r, weight, gradient, m, v, copy, scalars, {}, options); },
        verify, 2 * bytes_of({weight, m, v}) + bytes_of({gradient, copy}), 0};
}

struct Entry {
    const char* name;
    Workload (*make)(OpData&, const Sizes&, DType, int);
    int part;
    bool by_storage; ///< f32 and bf16, else f32 only
};

const Entry kEntries[] = {
    {"router_forward", router, 0, false},
    {"router_dgrad", router, 1, false},
    {"moe_layout", moe, 0, false},
    {"moe_gather", moe, 1, true},
    {"moe_unpermute", moe, 2, true},
    {"moe_weights_dgrad", moe, 3, true},
    {"swiglu_forward", swiglu, 0, true},
    {"swiglu_dgrad", swiglu, 1, true},
    {"rmsnorm_forward", rmsnorm, 0, true},
    {"rmsnorm_dgrad", rmsnorm, 1, true},
    {"rmsnorm_wgrad", rmsnorm, 2, true},
    {"rope", rope, 0, true},
    {"mla_keys_forward", mla_keys, 0, true},
    {"mla_keys_dgrad", mla_keys, 1, true},
    {"attention_forward", attention, 0, true},
    {"attention_dgrad", attention, 1, true},
    {"embedding_forward", embedding, 0, true},
    {"embedding_wgrad", embedding, 1, true},
    {"cross_entropy", cross_entropy, 0, true},
    {"add", elementwise, 0, true},
    {"cast", elementwise, 1, true},
    {"sum_squares", elementwise, 2, true},
    {"adamw", adamw, 0, true},
};

void register_all(Device& device) {
    const Sizes sizes = sizes_for(device);
    for (const Entry& entry : kEntries) {
        for (const DType dtype : {DType::F32, DType::BF16}) {
            if (dtype == DType::BF16 && !entry.by_storage) {
                continue;
            }
            const std::string name = std::string(entry.name) + "/" + to_string(dtype);
            benchmark::RegisterBenchmark(name.c_str(),
                                         [&device, sizes, entry, dtype](benchmark::State& state) {
                                             OpData data(device);
                                             const Workload work =
                                                 entry.make(data, sizes, dtype, entry.part);
                                             run_workload(state, data, work);
                                         })
                ->UseManualTime()
                ->Unit(benchmark::kMicrosecond);
        }
    }
}

} // namespace
} // namespace bellows::bench

int main(int argc, char** argv) {
    using namespace bellows;
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    try {
        const std::unique_ptr<Device> device = Device::create(DeviceOptions::from_environment({}));
        benchmark::AddCustomContext("device", device->info().name + ", " + device->info().driver);
        bench::register_all(*device);
        benchmark::RunSpecifiedBenchmarks();
        benchmark::Shutdown();
    } catch (const Error& error) {
        std::cerr << error.what() << "\n";
        return error.code() == ErrorCode::Unsupported ? 3 : 1;
    }
    return 0;
}
