// SPDX-License-Identifier: MIT
#include "verify/reference/moe_layer.hpp"

#include "verify/reference/ops.hpp"

#include <algorithm>
#include <cmath>

namespace bellows::reference {
namespace {

View slice(const Vector& rows, std::size_t first, std::size_t count, std::size_t columns) {
    return View(rows).subspan(first * columns, count * columns);
}

void append(Vector& to, View values) {
    to.insert(to.end(), values.begin(), values.end());
}

RankTokens route(const Vector& x, const MoeWeights& w, const MoeShape& shape,
                 const std::vector<std::int32_t>* experts) {
    RankTokens t;
    t.tokens = x.size() / shape.hidden;
    t.logits = gemm_nt(x, w.router, t.tokens, shape.router.experts, shape.hidden);
    t.scores = router_scores(t.logits, shape.router);
    t.experts = experts ? *experts : router_select(t.scores, w.bias, shape.router);
    t.sent = t.experts;
    if (shape.capacity_groups > 0) {
        const double mean =
            static_cast<double>(t.experts.size()) / static_cast<double>(shape.capacity_groups);
        t.sent = kept_choices(t.scores, t.experts, shape.router, shape.capacity_groups,
                              static_cast<std::size_t>(std::ceil(shape.capacity_factor * mean)),
                              shape.spared);
    }
    t.weights = router_weights(t.scores, t.experts, shape.router);
    t.y.assign(x.size(), 0.0);
    if (shape.shared_ffn > 0) {
        t.shared_gate_up =
            gemm_nt(x, w.shared_gate_up, t.tokens, 2 * shape.shared_ffn, shape.hidden);
        const Vector act = swiglu_forward(t.shared_gate_up, {}, t.tokens, shape.shared_ffn);
        t.y = gemm_nt(act, w.shared_down, t.tokens, shape.hidden, shape.shared_ffn);
    }
    return t;
}

RankRows receive(const std::vector<Vector>& x, const std::vector<RankTokens>& senders,
                 const MoeShape& shape, std::size_t first_expert, std::size_t experts) {
    RankRows rows;
    rows.counts.assign(experts, 0);
    for (std::size_t local = 0; local < experts; ++local) {
        const auto wanted = static_cast<std::int32_t>(first_expert + local);
        for (std::size_t rank = 0; rank < senders.size(); ++rank) {
            const RankTokens& sender = senders[rank];
            for (std::size_t at = 0; at < sender.sent.size(); ++at) {
                if (sender.sent[at] != wanted)
                    continue;
                const std::size_t token = at / shape.router.top_k;
                rows.origins.push_back({rank, token, at % shape.router.top_k});
                rows.weight.push_back(sender.weights[at]);
                append(rows.x, slice(x[rank], token, 1, shape.hidden));
                ++rows.counts[local];
            }
        }
    }
    return rows;
}

void run_experts(RankRows& rows, const MoeWeights& w, const MoeShape& shape,
                 std::size_t first_expert) {
    std::size_t at = 0;
    for (std::size_t local = 0; local < rows.counts.size(); ++local) {
        const auto m = static_cast<std::size_t>(rows.counts[local]);
        const std::size_t expert = first_expert + local;
        const Vector gate_up = gemm_nt(slice(rows.x, at, m, shape.hidden), w.gate_up[expert], m,
                                       2 * shape.ffn, shape.hidden);
        const Vector act = swiglu_forward(gate_up, slice(rows.weight, at, m, 1), m, shape.ffn);
        append(rows.gate_up, gate_up);
        append(rows.activation, act);
        append(rows.y, gemm_nt(act, w.down[expert], m, shape.hidden, shape.ffn));
        at += m;
    }
}

/// The gradients of one rank's experts, scattered to where the rows came from.
void experts_backward(const RankRows& rows, const std::vector<Vector>& dy, const MoeWeights& w,
                      const MoeShape& shape, std::size_t first_expert, Vector& drows,
                      MoeGrads& grads) {
    Vector dout, dweight;
    for (const RowOrigin& origin : rows.origins) // combine, backwards
        append(dout, slice(dy[origin.rank], origin.token, 1, shape.hidden));
    std::size_t at = 0;
    for (std::size_t local = 0; local < rows.counts.size(); ++local) {
        const auto m = static_cast<std::size_t>(rows.counts[local]);
        const std::size_t expert = first_expert + local;
        const View d = slice(dout, at, m, shape.hidden);
        grads.weights.down[expert] =
            gemm_tn(d, slice(rows.activation, at, m, shape.ffn), shape.hidden, shape.ffn, m);
        const Vector dact = gemm_nn(d, w.down[expert], m, shape.ffn, shape.hidden);
        const SwigluGrads s = swiglu_input_grad(dact, slice(rows.gate_up, at, m, 2 * shape.ffn),
                                                slice(rows.weight, at, m, 1), m, shape.ffn);
        grads.weights.gate_up[expert] =
            gemm_tn(s.dx, slice(rows.x, at, m, shape.hidden), 2 * shape.ffn, shape.hidden, m);
        append(drows, gemm_nn(s.dx, w.gate_up[expert], m, shape.hidden, 2 * shape.ffn));
        append(dweight, s.dweight);
        at += m;
    }
    for (std::size_t row = 0; row < rows.origins.size(); ++row) { // dispatch, backwards
        const RowOrigin& origin = rows.origins[row];
        grads.dweights[origin.rank][origin.token * shape.router.top_k + origin.slot] = dweight[row];
        for (std::size_t c = 0; c < shape.hidden; ++c)
            grads.dx[origin.rank][origin.token * shape.hidden + c] += drows[row * shape.hidden + c];
    }
}

void shared_backward(const Vector& dy, const Vector& x, const RankTokens& t, const MoeWeights& w,
                     const MoeShape& shape, Vector& dx, MoeWeights& dw) {
    const Vector act = swiglu_forward(t.shared_gate_up, {}, t.tokens, shape.shared_ffn);
    const Vector dact = gemm_nn(dy, w.shared_down, t.tokens, shape.shared_ffn, shape.hidden);
    const SwigluGrads s = swiglu_input_grad(dact, t.shared_gate_up, {}, t.tokens, shape.shared_ffn);
    accumulate(dx, gemm_nn(s.dx, w.shared_gate_up, t.tokens, shape.hidden, 2 * shape.shared_ffn));
    accumulate(dw.shared_down, gemm_tn(dy, act, shape.hidden, shape.shared_ffn, t.tokens));
    accumulate(dw.shared_gate_up, gemm_tn(s.dx, x, 2 * shape.shared_ffn, shape.hidden, t.tokens));
}

} // namespace

std::size_t ExpertPartition::first(std::size_t rank) const {
    return rank * (experts / ranks) + std::min(rank, experts % ranks);
}

std::size_t ExpertPartition::count(std::size_t rank) const {
    return experts / ranks + (rank < experts % ranks ? 1 : 0);
}

std::size_t ExpertPartition::owner(std::size_t expert) const {
    std::size_t rank = 0;
    while (rank + 1 < ranks && expert >= first(rank + 1))
        ++rank;
    return rank;
}

MoeShape moe_shape(const ModelConfig& config) {
    return {router_shape(config),
            static_cast<std::size_t>(config.hidden),
            static_cast<std::size_t>(config.moe_ffn),
            static_cast<std::size_t>(config.shared_ffn()),
            config.capacity_factor > 0 ? static_cast<std::size_t>(config.capacity_groups()) : 0,
            config.capacity_factor,
            {}};
}

MoeForward moe_forward(const std::vector<Vector>& x, const MoeWeights& weights,
                       const MoeShape& shape, const ExpertPartition& partition,
                       const std::vector<std::vector<std::int32_t>>* routing) {
    require_size("moe: x (ranks)", x.size(), partition.ranks);
    MoeForward out;
    for (std::size_t rank = 0; rank < partition.ranks; ++rank)
        out.tokens.push_back(route(x[rank], weights, shape, routing ? &(*routing)[rank] : nullptr));
    for (std::size_t rank = 0; rank < partition.ranks; ++rank) {
        out.rows.push_back(
            receive(x, out.tokens, shape, partition.first(rank), partition.count(rank)));
        run_experts(out.rows[rank], weights, shape, partition.first(rank));
    }
    for (const RankRows& rows : out.rows) // combine
        for (std::size_t row = 0; row < rows.origins.size(); ++row)
            for (std::size_t c = 0; c < shape.hidden; ++c)
                out.tokens[rows.origins[row].rank].y[rows.origins[row].token * shape.hidden + c] +=
                    rows.y[row * shape.hidden + c];
    return out;
}

MoeGrads moe_backward(const std::vector<Vector>& dy, const std::vector<Vector>& x,
                      const MoeForward& forward, const MoeWeights& weights, const MoeShape& shape,
                      const ExpertPartition& partition, const std::vector<Vector>& dscores,
                      const std::vector<Vector>& dlogits) {
    MoeGrads grads;
    grads.weights.gate_up.resize(partition.experts);
    grads.weights.down.resize(partition.experts);
    grads.weights.router.assign(weights.router.size(), 0.0);
    grads.weights.shared_gate_up.assign(weights.shared_gate_up.size(), 0.0);
    grads.weights.shared_down.assign(weights.shared_down.size(), 0.0);
    grads.drows.resize(partition.ranks);
    for (std::size_t rank = 0; rank < partition.ranks; ++rank) {
        grads.dx.emplace_back(x[rank].size(), 0.0);
        grads.dweights.emplace_back(forward.tokens[rank].weights.size(), 0.0);
    }
    for (std::size_t rank = 0; rank < partition.ranks; ++rank)
        experts_backward(forward.rows[rank], dy, weights, shape, partition.first(rank),
                         grads.drows[rank], grads);
    for (std::size_t rank = 0; rank < partition.ranks; ++rank) {
        const RankTokens& t = forward.tokens[rank];
        if (shape.shared_ffn > 0)
            shared_backward(dy[rank], x[rank], t, weights, shape, grads.dx[rank], grads.weights);
        Vector of_logits =
            router_input_grad(grads.dweights[rank], dscores.empty() ? View() : View(dscores[rank]),
                              t.scores, t.experts, shape.router);
        if (!dlogits.empty())
            accumulate(of_logits, dlogits[rank]);
        accumulate(grads.dx[rank], gemm_nn(of_logits, weights.router, t.tokens, shape.hidden,
                                           shape.router.experts));
        accumulate(grads.weights.router,
                   gemm_tn(of_logits, x[rank], shape.router.experts, shape.hidden, t.tokens));
        grads.dlogits.push_back(std::move(of_logits));
    }
    return grads;
}

} // namespace bellows::reference
