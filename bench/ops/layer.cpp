// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

namespace bellows::bench {

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

} // namespace bellows::bench
