// SPDX-License-Identifier: MIT
#include "verify/reference/router.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace bellows::reference {
namespace {

/// Indices of values in descending order, the lowest index first among equals.
std::vector<std::size_t> descending(const Vector& values) {
    std::vector<std::size_t> order(values.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
    return order;
}

/// One token's choice and the margin by which it was made.
struct Choice {
    std::vector<std::int32_t> experts;
    double margin = std::numeric_limits<double>::infinity();
};

double group_score(const Vector& biased, std::size_t first, const RouterShape& shape) {
    const std::size_t size = shape.experts / shape.n_group;
    Vector group(biased.begin() + static_cast<std::ptrdiff_t>(first),
                 biased.begin() + static_cast<std::ptrdiff_t>(first + size));
    std::sort(group.begin(), group.end(), std::greater<>());
    const bool two =
        shape.group_score == GroupScore::TopTwo ||
        (shape.group_score == GroupScore::Auto && shape.score == ScoreFunction::Sigmoid);
    return group[0] + (two && size > 1 ? group[1] : 0);
}

Choice choose(View scores, View bias, const RouterShape& shape) {
    Vector biased(scores.begin(), scores.end());
    if (!bias.empty())
        accumulate(biased, bias);
    Choice choice;
    if (shape.topk_group < shape.n_group) {
        const std::size_t size = shape.experts / shape.n_group;
        Vector groups(shape.n_group);
        for (std::size_t g = 0; g < shape.n_group; ++g)
            groups[g] = group_score(biased, g * size, shape);
        const std::vector<std::size_t> order = descending(groups);
        choice.margin = groups[order[shape.topk_group - 1]] - groups[order[shape.topk_group]];
        for (std::size_t i = shape.topk_group; i < shape.n_group; ++i)
            std::fill_n(biased.begin() + static_cast<std::ptrdiff_t>(order[i] * size), size,
                        -std::numeric_limits<double>::infinity());
    }
    const std::vector<std::size_t> order = descending(biased);
    for (std::size_t slot = 0; slot < shape.top_k; ++slot)
        choice.experts.push_back(static_cast<std::int32_t>(order[slot]));
    if (shape.top_k < shape.experts)
        choice.margin =
            std::min(choice.margin, biased[order[shape.top_k - 1]] - biased[order[shape.top_k]]);
    return choice;
}

} // namespace

RouterShape router_shape(const ModelConfig& config) {
    return {static_cast<std::size_t>(config.routed_experts),
            static_cast<std::size_t>(config.top_k),
            static_cast<std::size_t>(config.n_group),
            static_cast<std::size_t>(config.topk_group),
            config.score_function,
            config.normalize_top_k,
            config.route_scale,
            config.group_score};
}

Vector router_scores(View logits, const RouterShape& shape) {
    Vector scores(logits.size());
    for (std::size_t at = 0; at < logits.size(); at += shape.experts) {
        const View row = logits.subspan(at, shape.experts);
        if (shape.score == ScoreFunction::Sigmoid) {
            for (std::size_t e = 0; e < row.size(); ++e)
                scores[at + e] = 1 / (1 + std::exp(-row[e]));
            continue;
        }
        const double largest = *std::max_element(row.begin(), row.end());
        double sum = 0;
        for (const double value : row)
            sum += std::exp(value - largest);
        for (std::size_t e = 0; e < row.size(); ++e)
            scores[at + e] = std::exp(row[e] - largest) / sum;
    }
    return scores;
}

std::vector<std::int32_t> router_select(View scores, View bias, const RouterShape& shape) {
    std::vector<std::int32_t> experts;
    for (std::size_t at = 0; at < scores.size(); at += shape.experts) {
        const Choice choice = choose(scores.subspan(at, shape.experts), bias, shape);
        experts.insert(experts.end(), choice.experts.begin(), choice.experts.end());
    }
    return experts;
}

std::vector<std::int32_t> kept_choices(View scores, std::span<const std::int32_t> experts,
                                       const RouterShape& shape, std::size_t groups,
                                       std::size_t capacity,
                                       std::span<const std::uint32_t> spared) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const auto chooses = [&](std::size_t slot) {
        return experts[slot] >= 0 && static_cast<std::size_t>(experts[slot]) < shape.experts;
    };
    const auto is_spared = [&](std::size_t slot) {
        return !spared.empty() && spared[slot * spared.size() / experts.size()] != 0;
    };
    Vector affinity(experts.size(), -kInfinity);
    for (std::size_t slot = 0; slot < experts.size(); ++slot)
        if (chooses(slot)) {
            const double score = scores[slot / shape.top_k * shape.experts +
                                        static_cast<std::size_t>(experts[slot])];
            affinity[slot] = std::isnan(score) ? -kInfinity : score;
        }
    std::vector<std::int32_t> kept(experts.size(), -1);
    std::vector<std::size_t> taken(groups, 0);
    for (const bool first : {true, false})
        for (const std::size_t slot : descending(affinity)) {
            if (!chooses(slot) || is_spared(slot) != first)
                continue;
            const std::size_t size = shape.experts / groups;
            if (taken[static_cast<std::size_t>(experts[slot]) / size]++ < capacity || first)
                kept[slot] = experts[slot];
        }
    return kept;
}

Vector router_margins(View scores, View bias, const RouterShape& shape) {
    Vector margins;
    for (std::size_t at = 0; at < scores.size(); at += shape.experts)
        margins.push_back(choose(scores.subspan(at, shape.experts), bias, shape).margin);
    return margins;
}

Vector router_weights(View scores, std::span<const std::int32_t> experts,
                      const RouterShape& shape) {
    Vector weights(experts.size());
    for (std::size_t at = 0; at < experts.size(); at += shape.top_k) {
        const std::size_t row = at / shape.top_k * shape.experts;
        double sum = 0;
        for (std::size_t slot = 0; slot < shape.top_k; ++slot) {
            weights[at + slot] = scores[row + static_cast<std::size_t>(experts[at + slot])];
            sum += weights[at + slot];
        }
        const double factor = shape.scale / (shape.normalize ? sum + 1e-20 : 1);
        for (std::size_t slot = 0; slot < shape.top_k; ++slot)
            weights[at + slot] *= factor;
    }
    return weights;
}

Vector router_input_grad(View dweights, View dscores, View scores,
                         std::span<const std::int32_t> experts, const RouterShape& shape) {
    Vector ds =
        dscores.empty() ? Vector(scores.size(), 0.0) : Vector(dscores.begin(), dscores.end());
    require_size("router: dweights", dweights.size(), experts.size());
    for (std::size_t at = 0; at < experts.size(); at += shape.top_k) {
        const std::size_t row = at / shape.top_k * shape.experts;
        double sum = 1e-20, projection = 0; // w_i = scale · s_i / sum
        for (std::size_t slot = 0; slot < shape.top_k; ++slot) {
            const double score = scores[row + static_cast<std::size_t>(experts[at + slot])];
            sum += score;
            projection += dweights[at + slot] * score;
        }
        for (std::size_t slot = 0; slot < shape.top_k; ++slot)
            ds[row + static_cast<std::size_t>(experts[at + slot])] +=
                shape.normalize ? shape.scale * (dweights[at + slot] - projection / sum) / sum
                                : shape.scale * dweights[at + slot];
    }
    Vector dlogits(scores.size());
    for (std::size_t at = 0; at < scores.size(); at += shape.experts) {
        double projection = 0;
        for (std::size_t e = 0; e < shape.experts; ++e)
            projection += ds[at + e] * scores[at + e];
        for (std::size_t e = at; e < at + shape.experts; ++e)
            dlogits[e] = shape.score == ScoreFunction::Sigmoid ? ds[e] * scores[e] * (1 - scores[e])
                                                               : scores[e] * (ds[e] - projection);
    }
    return dlogits;
}

std::vector<std::uint64_t> count_experts(std::span<const std::int32_t> experts,
                                         std::size_t num_experts) {
    std::vector<std::uint64_t> counts(num_experts, 0);
    for (const std::int32_t expert : experts)
        ++counts.at(static_cast<std::size_t>(expert));
    return counts;
}

Vector updated_bias(View bias, std::span<const std::uint64_t> counts, double rate) {
    require_size("updated_bias: counts", counts.size(), bias.size());
    const std::uint64_t sum = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
    Vector out(bias.begin(), bias.end());
    for (std::size_t e = 0; e < out.size(); ++e) { // count · experts against the sum: no rounding
        const std::uint64_t scaled = counts[e] * counts.size();
        out[e] += scaled < sum ? rate : scaled > sum ? -rate : 0;
    }
    return out;
}

Permutation make_permutation(std::span<const std::int32_t> experts, std::size_t top_k,
                             std::size_t num_experts, std::size_t alignment) {
    Permutation p;
    p.top_k = top_k;
    p.tokens = experts.size() / top_k;
    p.counts.assign(num_experts, 0);
    p.starts.assign(num_experts + 1, 0);
    p.row_of_slot.assign(experts.size(), -1);
    for (const std::int32_t expert : experts)
        if (expert >= 0)
            ++p.counts.at(static_cast<std::size_t>(expert));
    for (std::size_t e = 0; e < num_experts; ++e)
        p.starts[e + 1] = p.starts[e] + (p.counts[e] + alignment - 1) / alignment * alignment;
    std::vector<std::uint64_t> next(p.starts.begin(), p.starts.end() - 1);
    for (std::size_t slot = 0; slot < experts.size(); ++slot)
        if (experts[slot] >= 0)
            p.row_of_slot[slot] =
                static_cast<std::int64_t>(next[static_cast<std::size_t>(experts[slot])]++);
    return p;
}

Vector permute(View x, const Permutation& p, std::size_t hidden) {
    require_size("permute: x", x.size(), p.tokens * hidden);
    Vector rows(p.rows() * hidden, 0.0);
    for (std::size_t slot = 0; slot < p.row_of_slot.size(); ++slot)
        if (p.row_of_slot[slot] >= 0)
            for (std::size_t c = 0; c < hidden; ++c)
                rows[static_cast<std::size_t>(p.row_of_slot[slot]) * hidden + c] =
                    x[slot / p.top_k * hidden + c];
    return rows;
}

Vector unpermute(View rows, View weights, const Permutation& p, std::size_t hidden) {
    require_size("unpermute: rows", rows.size(), p.rows() * hidden);
    Vector y(p.tokens * hidden, 0.0);
    for (std::size_t slot = 0; slot < p.row_of_slot.size(); ++slot)
        if (p.row_of_slot[slot] >= 0)
            for (std::size_t c = 0; c < hidden; ++c)
                y[slot / p.top_k * hidden + c] +=
                    rows[static_cast<std::size_t>(p.row_of_slot[slot]) * hidden + c] *
                    (weights.empty() ? 1 : weights[slot]);
    return y;
}

UnpermuteGrads unpermute_input_grad(View dy, View rows, View weights, const Permutation& p,
                                    std::size_t hidden) {
    require_size("unpermute: dy", dy.size(), p.tokens * hidden);
    UnpermuteGrads grads{Vector(rows.size(), 0.0), Vector(p.row_of_slot.size(), 0.0)};
    for (std::size_t slot = 0; slot < p.row_of_slot.size(); ++slot) {
        if (p.row_of_slot[slot] < 0)
            continue;
        for (std::size_t c = 0; c < hidden; ++c) {
            const std::size_t at = static_cast<std::size_t>(p.row_of_slot[slot]) * hidden + c;
            const double d = dy[slot / p.top_k * hidden + c];
            grads.drows[at] = d * (weights.empty() ? 1 : weights[slot]);
            grads.dweights[slot] += d * rows[at];
        }
    }
    return grads;
}

} // namespace bellows::reference
