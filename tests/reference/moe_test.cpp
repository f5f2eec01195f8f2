// SPDX-License-Identifier: MIT
// The f64 reference router, permutation and MoE layer against finite differences, hand-made choices
// and independence from the number of ranks.

#include "support/compare.hpp"
#include "support/finite_difference.hpp"
#include "verify/reference/balance.hpp"
#include "verify/reference/moe_layer.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

namespace bellows::reference {
namespace {

using test::dot;
using test::elements_match;
using test::gradient_matches;
using test::within;
using Indices = std::vector<std::int32_t>;

Vector random(std::size_t count, std::uint64_t seed) {
    return test::to_double(test::random_f32(count, seed));
}

TEST(Router, ChoosesTheLowestIndexAmongEquals) {
    const RouterShape shape{.experts = 5, .top_k = 3};
    EXPECT_EQ(router_select(Vector{0.5, 0.7, 0.5, 0.7, 0.5}, {}, shape), (Indices{1, 3, 0}));
    EXPECT_EQ(router_select(Vector(5, 0.25), {}, shape), (Indices{0, 1, 2}));
}

TEST(Router, BiasMovesTheChoiceButNotTheWeights) {
    const RouterShape shape{.experts = 3, .top_k = 1, .normalize = false, .scale = 2};
    const Vector scores = {0.5, 0.4, 0.1}, bias = {0, 0, 1};
    const Indices chosen = router_select(scores, bias, shape);
    EXPECT_EQ(chosen, Indices{2});
    EXPECT_EQ(router_weights(scores, chosen, shape), Vector{0.2});
}

TEST(Router, GroupsCountAsTheirTwoBestOrTheirBest) {
    RouterShape shape{.experts = 6, .top_k = 2, .n_group = 3, .topk_group = 1};
    const Vector scores = {0.9, 0.1, 0.6, 0.6, 0.2, 0.3};
    EXPECT_EQ(router_select(scores, {}, shape), (Indices{2, 3})) << "1.2 beats 1.0";
    shape.score = ScoreFunction::Softmax;
    EXPECT_EQ(router_select(scores, {}, shape), (Indices{0, 1})) << "0.9 beats 0.6";
    shape.topk_group = 2;
    EXPECT_EQ(router_select(scores, {}, shape), (Indices{0, 2}));
    const Vector equal(6, 0.5);
    EXPECT_EQ(router_select(equal, {}, shape), (Indices{0, 1})) << "the lowest groups";
    const Vector negative_bias = {-2, -2, -2, -2, -3, -3}; // a masked group must still lose
    EXPECT_EQ(router_select(scores, negative_bias, shape), (Indices{0, 2}));
}

TEST(Router, MarginsAreTheDistanceToAnotherChoice) {
    RouterShape shape{.experts = 4, .top_k = 1};
    const Vector scores = {0.9, 0.25, 0.5, 0.5};
    EXPECT_NEAR(router_margins(scores, {}, shape)[0], 0.4, 1e-15);
    shape.n_group = 2;
    EXPECT_NEAR(router_margins(scores, {}, shape)[0], 0.15, 1e-15) << "1.15 against 1.0";
    shape.top_k = 2;
    EXPECT_NEAR(router_margins(scores, {}, shape)[0], 0.15, 1e-15) << "all of a group is chosen";
    EXPECT_TRUE(std::isinf(router_margins(scores, {}, {.experts = 4, .top_k = 4})[0]));
}

TEST(Router, Gradients) {
    const std::size_t tokens = 4, experts = 6, top_k = 3;
    const Vector logits = random(tokens * experts, 1);
    const Vector dweights = random(tokens * top_k, 2), dscores = random(tokens * experts, 3);
    for (const ScoreFunction function : {ScoreFunction::Sigmoid, ScoreFunction::Softmax}) {
        for (const bool normalize : {false, true}) {
            const RouterShape shape{.experts = experts,
                                    .top_k = top_k,
                                    .score = function,
                                    .normalize = normalize,
                                    .scale = 2.5};
            const Vector scores = router_scores(logits, shape);
            const Indices chosen = router_select(scores, {}, shape);
            const auto loss = [&](const Vector& l) {
                const Vector s = router_scores(l, shape);
                return dot(router_weights(s, chosen, shape), dweights) + dot(s, dscores);
            };
            EXPECT_TRUE(gradient_matches(
                router_input_grad(dweights, dscores, scores, chosen, shape), logits, loss))
                << to_string(function) << " normalize " << normalize;
        }
    }
}

TEST(Router, SumsOfNormalisedWeights) {
    const RouterShape shape{.experts = 8, .top_k = 3, .scale = 2.5};
    const Vector scores = router_scores(random(80, 1), shape);
    const Vector weights = router_weights(scores, router_select(scores, {}, shape), shape);
    for (std::size_t t = 0; t < 10; ++t)
        EXPECT_NEAR(weights[3 * t] + weights[3 * t + 1] + weights[3 * t + 2], 2.5, 1e-12);
}

TEST(Router, BiasFollowsTheSignOfTheLoad) {
    const Vector updated =
        updated_bias(Vector{0.5, 0.5, 0.5}, std::vector<std::uint64_t>{4, 1, 7}, 0.25);
    EXPECT_EQ(updated, (Vector{0.5, 0.75, 0.25})) << "an expert at the mean keeps its bias";
}

TEST(Router, BalanceLossesValueAndGradient) {
    const std::size_t experts = 4, sequences = 2, length = 3, total_tokens = 15;
    for (const ScoreFunction function : {ScoreFunction::Sigmoid, ScoreFunction::Softmax})
        for (const BalanceLossKind kind : {BalanceLossKind::Sequence, BalanceLossKind::Expert}) {
            const RouterShape shape{
                .experts = experts, .top_k = 2, .n_group = 2, .topk_group = 1, .score = function};
            const BalanceShape balance{kind, 0.1, 0.3, 0.2, 2, 1};
            const Vector scores = router_scores(random(sequences * length * experts, 1), shape);
            const auto counts =
                balance_counts(scores, router_select(scores, {}, shape), shape, balance, sequences);
            const BalanceLoss b = balance_loss(scores, counts, shape, balance, total_tokens);
            EXPECT_TRUE(gradient_matches(b.dscores, scores, [&](const Vector& s) {
                return balance_loss(s, counts, shape, balance, total_tokens).loss();
            }));
        }
}

TEST(Router, BalanceLossesOfAnEvenLoadAreTheirWeights) {
    const RouterShape shape{.experts = 4, .top_k = 2};
    const BalanceShape balance{BalanceLossKind::Sequence, 0.5, 0.3, 0.2, 2, 1};
    const Vector scores = {0.9, 0.8, 0.2, 0.1, 0.1, 0.2, 0.8, 0.9};
    const auto counts = balance_counts(scores, Indices{0, 1, 3, 2}, shape, balance, 1);
    EXPECT_EQ(counts[0].experts, (std::vector<std::uint64_t>{1, 1, 1, 1}));
    EXPECT_EQ(counts[0].device_tokens, (std::vector<std::uint64_t>{1, 1}));
    const BalanceLoss b = balance_loss(scores, counts, shape, balance, 2);
    EXPECT_NEAR(b.experts, 0.5, 1e-15);
    EXPECT_NEAR(b.devices, 0.3, 1e-15);
    EXPECT_NEAR(b.communication, 0.2, 1e-15);
}

TEST(Router, BalanceCountsOfScoresIgnoreBiasAndGroups) {
    const RouterShape shape{.experts = 4, .top_k = 2, .n_group = 2, .topk_group = 1};
    const Vector scores = {0.9, 0.1, 0.8, 0.2}, bias = {0, 0, 1, 1};
    const Indices chosen = router_select(scores, bias, shape);
    EXPECT_EQ(chosen, (Indices{2, 3}));
    const auto counts = [&](BalanceLossKind kind) {
        return balance_counts(scores, chosen, shape, {.kind = kind}, 1)[0].experts;
    };
    EXPECT_EQ(counts(BalanceLossKind::Sequence), (std::vector<std::uint64_t>{1, 0, 1, 0}));
    EXPECT_EQ(counts(BalanceLossKind::Expert), (std::vector<std::uint64_t>{0, 0, 1, 1}));
}

TEST(Router, ZLossValueAndGradient) {
    EXPECT_NEAR(router_z_loss(Vector{0, 0, 1000, 1000}, 2, 2, 0.1).loss,
                0.05 * (std::pow(std::log(2.0), 2) + std::pow(1000 + std::log(2.0), 2)), 1e-9);
    const Vector logits = random(12, 3);
    EXPECT_TRUE(gradient_matches(router_z_loss(logits, 4, 5, 0.1).dlogits, logits,
                                 [](const Vector& l) { return router_z_loss(l, 4, 5, 0.1).loss; }));
}

TEST(Permutation, GroupsByExpertInTokenOrder) {
    const Indices experts = {2, 0, /**/ 0, 2, /**/ -1, 2};
    const Permutation p = make_permutation(experts, 2, 4, 4);
    EXPECT_EQ(p.counts, (std::vector<std::uint64_t>{2, 0, 3, 0}));
    EXPECT_EQ(p.starts, (std::vector<std::uint64_t>{0, 4, 4, 8, 8}));
    EXPECT_EQ(p.row_of_slot, (std::vector<std::int64_t>{4, 0, 1, 5, -1, 6}));
    const Vector rows = permute(Vector{1, 2, 3}, p, 1);
    EXPECT_EQ(rows, (Vector{1, 2, 0, 0, 1, 2, 3, 0}));
    EXPECT_EQ(unpermute(rows, {}, p, 1), (Vector{2, 4, 3}));
}

TEST(Permutation, Gradients) {
    const Indices experts = test::random_indices(10, 1, 3);
    const Permutation p = make_permutation(experts, 2, 3, 4);
    const std::size_t hidden = 3;
    const Vector rows = random(p.rows() * hidden, 2), weights = random(10, 3);
    const Vector dy = random(p.tokens * hidden, 4), x = random(p.tokens * hidden, 5);
    const auto loss = [&](View r, View w) { return dot(unpermute(r, w, p, hidden), dy); };
    const UnpermuteGrads g = unpermute_input_grad(dy, rows, weights, p, hidden);
    EXPECT_TRUE(gradient_matches(g.drows, rows, [&](const Vector& v) { return loss(v, weights); }));
    EXPECT_TRUE(
        gradient_matches(g.dweights, weights, [&](const Vector& v) { return loss(rows, v); }));
    EXPECT_TRUE(gradient_matches(unpermute(rows, {}, p, hidden), x, [&](const Vector& v) {
        return dot(permute(v, p, hidden), rows);
    }));
}

TEST(ExpertPartition, FirstRanksTakeTheRemainder) {
    const ExpertPartition p{.experts = 7, .ranks = 3};
    EXPECT_EQ(p.count(0), 3u);
    EXPECT_EQ(p.count(2), 2u);
    EXPECT_EQ(p.first(2), 5u);
    EXPECT_EQ(p.owner(2), 0u);
    EXPECT_EQ(p.owner(3), 1u);
    EXPECT_EQ(p.owner(6), 2u);
    const ExpertPartition few{.experts = 2, .ranks = 3};
    EXPECT_EQ(few.count(2), 0u);
    EXPECT_EQ(few.owner(1), 1u);
}

struct Layer {
    MoeShape shape{
        .router = {.experts = 5, .top_k = 2, .scale = 1.5}, .hidden = 4, .ffn = 3, .shared_ffn = 2};
    MoeWeights weights;
    Vector x = random(6 * 4, 30), dy = random(6 * 4, 31);

    Layer() {
        weights.router = random(5 * 4, 1);
        weights.bias = random(5, 2);
        for (std::size_t e = 0; e < 5; ++e) {
            weights.gate_up.push_back(random(6 * 4, 3 + e));
            weights.down.push_back(random(4 * 3, 13 + e));
        }
        weights.shared_gate_up = random(4 * 4, 23);
        weights.shared_down = random(4 * 2, 24);
    }

    /// The tokens of x or dy, split unevenly: a rank without any stands in the middle.
    static std::vector<Vector> split(const Vector& v, std::size_t ranks) {
        std::vector<Vector> parts(ranks);
        const std::size_t first = ranks == 1 ? v.size() : 4 * 4;
        parts[0].assign(v.begin(), v.begin() + static_cast<std::ptrdiff_t>(first));
        parts[ranks - 1].insert(parts[ranks - 1].end(),
                                v.begin() + static_cast<std::ptrdiff_t>(first), v.end());
        return parts;
    }
};

Vector joined(const std::vector<Vector>& parts) {
    Vector all;
    for (const Vector& part : parts)
        all.insert(all.end(), part.begin(), part.end());
    return all;
}

TEST(MoeLayer, EqualsTheSumOverItsExperts) {
    const Layer layer;
    const MoeForward f = moe_forward({layer.x}, layer.weights, layer.shape, {5, 1});
    const RankTokens& t = f.tokens[0];
    for (std::size_t token = 0; token < 6; ++token) {
        for (std::size_t c = 0; c < 4; ++c) {
            double sum = 0;
            const auto ffn = [&](const Vector& gate_up, const Vector& down, std::size_t width) {
                double y = 0;
                for (std::size_t i = 0; i < width; ++i) {
                    double gate = 0, up = 0;
                    for (std::size_t h = 0; h < 4; ++h) {
                        gate += layer.x[token * 4 + h] * gate_up[i * 4 + h];
                        up += layer.x[token * 4 + h] * gate_up[(width + i) * 4 + h];
                    }
                    y += down[c * width + i] * up * gate / (1 + std::exp(-gate));
                }
                return y;
            };
            for (std::size_t slot = 0; slot < 2; ++slot) {
                const auto e = static_cast<std::size_t>(t.experts[token * 2 + slot]);
                sum += t.weights[token * 2 + slot] *
                       ffn(layer.weights.gate_up[e], layer.weights.down[e], 3);
            }
            sum += ffn(layer.weights.shared_gate_up, layer.weights.shared_down, 2);
            EXPECT_NEAR(t.y[token * 4 + c], sum, 1e-14);
        }
    }
}

TEST(MoeLayer, DoesNotDependOnTheRanks) {
    const Layer layer;
    const MoeForward one = moe_forward({layer.x}, layer.weights, layer.shape, {5, 1});
    const MoeGrads g1 =
        moe_backward({layer.dy}, {layer.x}, one, layer.weights, layer.shape, {5, 1});
    for (const std::size_t ranks : {std::size_t{2}, std::size_t{3}, std::size_t{7}}) {
        const ExpertPartition partition{5, ranks};
        const std::vector<Vector> x = Layer::split(layer.x, ranks);
        const MoeForward f = moe_forward(x, layer.weights, layer.shape, partition);
        const MoeGrads g = moe_backward(Layer::split(layer.dy, ranks), x, f, layer.weights,
                                        layer.shape, partition);
        Vector y;
        std::size_t rows = 0;
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            y.insert(y.end(), f.tokens[rank].y.begin(), f.tokens[rank].y.end());
            rows += f.rows[rank].origins.size();
            EXPECT_EQ(f.rows[rank].counts.size(), partition.count(rank));
        }
        EXPECT_EQ(rows, 12u) << "every slot of every token arrives once";
        const auto tight = within(1e-14, 1e-13);
        EXPECT_TRUE(elements_match(y, one.tokens[0].y, {6, 4}, tight));
        EXPECT_TRUE(elements_match(joined(g.dx), g1.dx[0], {6, 4}, tight));
        EXPECT_TRUE(elements_match(g.weights.router, g1.weights.router, {5, 4}, tight));
        for (std::size_t e = 0; e < 5; ++e) {
            EXPECT_TRUE(elements_match(g.weights.gate_up[e], g1.weights.gate_up[e], {6, 4}, tight));
            EXPECT_TRUE(elements_match(g.weights.down[e], g1.weights.down[e], {4, 3}, tight));
        }
    }
}

TEST(MoeLayer, Gradients) {
    Layer layer;
    const ExpertPartition partition{5, 2};
    const std::vector<Vector> dy = Layer::split(layer.dy, 2);
    const auto forward = [&](const std::vector<std::vector<std::int32_t>>* routing) {
        return moe_forward(Layer::split(layer.x, 2), layer.weights, layer.shape, partition,
                           routing);
    };
    const MoeForward f = forward(nullptr);
    const MoeGrads g =
        moe_backward(dy, Layer::split(layer.x, 2), f, layer.weights, layer.shape, partition);
    const std::vector<std::vector<std::int32_t>> routing = {f.tokens[0].experts,
                                                            f.tokens[1].experts};
    const auto check = [&](const char* name, Vector& variable, const Vector& gradient) {
        const Vector start = variable;
        EXPECT_TRUE(gradient_matches(gradient, start, [&](const Vector& v) {
            variable = v;
            const MoeForward moved = forward(&routing);
            return dot(moved.tokens[0].y, dy[0]) + dot(moved.tokens[1].y, dy[1]);
        })) << name;
        variable = start;
    };
    check("x", layer.x, joined(g.dx));
    check("router", layer.weights.router, g.weights.router);
    check("shared_gate_up", layer.weights.shared_gate_up, g.weights.shared_gate_up);
    check("shared_down", layer.weights.shared_down, g.weights.shared_down);
    std::size_t used = 0;
    for (std::size_t e = 0; e < 5; ++e) {
        const std::size_t owner = partition.owner(e);
        if (f.rows[owner].counts[e - partition.first(owner)] == 0)
            continue;
        ++used;
        check("gate_up", layer.weights.gate_up[e], g.weights.gate_up[e]);
        check("down", layer.weights.down[e], g.weights.down[e]);
    }
    EXPECT_GE(used, 3u);
}

} // namespace
} // namespace bellows::reference
