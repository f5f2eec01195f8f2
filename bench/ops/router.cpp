// SPDX-License-Identifier: MIT
#include "ops/workloads.hpp"

#include <algorithm>

namespace bellows::bench {

Workload router(OpData& data, const Sizes& s, DType, int part) {
    const TensorView logits = data.random(DType::F32, {s.tokens, s.experts}, -3, 3),
                     scores = data.empty(DType::F32, {s.tokens, s.experts}),
                     ids = data.empty(DType::I32, {s.tokens, s.top_k}),
                     weights = data.empty(DType::F32, {s.tokens, s.top_k}),
                     d_weights = data.random(DType::F32, {s.tokens, s.top_k}),
                     d_logits = data.empty(DType::F32, {s.tokens, s.experts}),
                     counts = data.empty(DType::U32, {s.experts}),
                     bias = data.empty(DType::F32, {s.experts});
    Recording recording(data.device(), QueueRole::Compute, "prepare");
    ops::router_forward(recording, logits, {}, scores, ids, weights, {});
    ops::expert_counts(recording, ids, counts, false);
    recording.fill(bias.buffer, 0);
    data.device().submit(recording).wait();
    const auto verify_counts = [=, &data]() -> std::string {
        std::vector<double> expected(s.experts);
        for (const double id : data.read(ids))
            ++expected[static_cast<std::uint64_t>(id)];
        const auto counted = data.read(counts), biases = data.read(bias);
        const double mean =
            static_cast<double>(s.tokens * s.top_k) / static_cast<double>(s.experts);
        for (std::uint64_t e = 0; e < s.experts; ++e) {
            const double step = expected[e] < mean ? 0.5 : expected[e] > mean ? -0.5 : 0;
            const std::string wrong = part == 2 ? compare("count", e, counted[e], expected[e], 0)
                                                : compare("bias", e, biases[e], step, 0);
            if (!wrong.empty())
                return wrong;
        }
        return "";
    };
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
    const Workload work[] = {
        {[=](Recording& r) { ops::router_forward(r, logits, {}, scores, ids, weights, {}); },
         verify, bytes_of({logits, scores, ids, weights}), 0},
        {[=](Recording& r) { ops::router_dgrad(r, d_weights, ids, scores, d_logits, {}); }, verify,
         bytes_of({d_weights, ids, scores, d_logits}), 0},
        {[=](Recording& r) { ops::expert_counts(r, ids, counts, false); }, verify_counts,
         bytes_of({ids, counts}), 0},
        {[=](Recording& r) {
             r.fill(bias.buffer, 0);
             ops::router_bias_update(r, counts, bias, 0.5f);
         },
         verify_counts, bytes_of({counts, bias}), 0},
    };
    return work[part];
}

} // namespace bellows::bench
