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

Workload moe(OpData& data, const Sizes& s, DType act, int part) {
    const std::uint32_t alignment = 16;
    const std::uint64_t capacity = ops::moe_capacity(s.tokens, s.top_k, s.experts, alignment);
    const TensorView ids = data.indices(DType::I32, {s.tokens, s.top_k}, s.experts),
                     x = data.random(act, {s.tokens, s.hidden}),
                     weights = data.random(DType::F32, {s.tokens, s.top_k}, 0, 1),
                     rows = data.empty(act, {capacity, s.hidden}),
                     y = data.empty(act, {s.tokens, s.hidden}),
                     d_weights = data.empty(DType::F32, {s.tokens, s.top_k}),
                     row_values = data.empty(DType::F32, {capacity}),
                     slot_values = data.empty(DType::F32, {s.tokens, s.top_k});
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
    ops::moe_scalars_to_rows(recording, weights, layout, row_values);
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
        const auto dw = data.read(d_weights), by_row = data.read(row_values);
        const auto by_slot = data.read(slot_values);
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
            } else if (part == 4) {
                const auto row = static_cast<std::uint64_t>(map[t * s.top_k]);
                wrong = compare("row", row, by_row[row], w[t * s.top_k], 0);
            } else if (part == 5) {
                wrong = compare("slot", t, by_slot[t * s.top_k], w[t * s.top_k], 0);
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
        {[=](Recording& r) { ops::moe_scalars_to_rows(r, weights, layout, row_values); }, verify,
         bytes_of({weights, layout.row_to_slot, row_values}), 0},
        {[=](Recording& r) { ops::moe_scalars_to_slots(r, row_values, layout, slot_values); },
         verify, bytes_of({row_values, layout.slot_to_row, slot_values}), 0},
    };
    return work[part];
}

} // namespace bellows::bench
