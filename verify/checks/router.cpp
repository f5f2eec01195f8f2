// SPDX-License-Identifier: MIT
// The router with its gradient and that of the balance loss, its counts and its balance rule.
#include "verify/checks/router_cases.hpp"

#include <algorithm>

namespace bellows::checks {

namespace {

using reference::to_double;

/// Tokens whose choice hangs on less than the scores' error may choose otherwise; at most a tenth.
void compare_choice(Check& check, const RouterCase& c, const std::vector<std::int32_t>& actual,
                    const std::vector<std::int32_t>& expected, const reference::Vector& margins) {
    constexpr double kUndecided = 1e-5;
    std::vector<std::int32_t> decided_actual, decided_expected;
    for (std::size_t i = 0; i < actual.size(); ++i)
        if (margins[i / c.top_k] >= kUndecided) {
            decided_actual.push_back(actual[i]);
            decided_expected.push_back(expected[i]);
        }
    check.that("choice", 10 * decided_actual.size() >= 9 * actual.size(),
               "too few tokens are decided");
    check.exact("choice", decided_actual, decided_expected);
}

void check_router(Check& check, const OpRig& rig, const RouterCase& c) {
    check.begin_case(c.name);
    const auto logits = reference::random_f32(c.tokens * c.experts, 1, -4, 4);
    const auto bias = reference::random_f32(c.experts, 2, -0.1, 0.1);
    const auto d_weights = reference::random_f32(c.tokens * c.top_k, 3);
    const OpTensor logits_t = rig.tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor bias_t = rig.tensor(DType::F32, {c.experts}, bias);
    const OpTensor d_weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor counts = rig.result(DType::U32, {c.experts});
    rig.run([&](Recording& recording) {
        ops::router_forward(recording, logits_t, c.bias ? bias_t.view : TensorView{}, scores, ids,
                            weights, options_of(c));
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options_of(c));
        ops::expert_counts(recording, ids, counts, false);
    });
    const reference::RouterShape shape = shape_of(c);
    const auto expected_bias = c.bias ? to_double(bias) : reference::Vector{};
    const auto expected = reference::router_scores(to_double(logits), shape);
    // exp to 2 ulp, a sum of `experts` terms, one division.
    const double ulps = 8 + static_cast<double>(c.experts);
    check.elements("scores", rig.read(scores), expected, {c.tokens, c.experts},
                   storage_bound(DType::F32, ulps));
    const auto chosen = rig.read<std::int32_t>(ids);
    compare_choice(check, c, chosen, reference::router_select(expected, expected_bias, shape),
                   reference::router_margins(expected, expected_bias, shape));
    // From here on with the choice as it was made.
    check.elements("weights", rig.read(weights), reference::router_weights(expected, chosen, shape),
                   {c.tokens, c.top_k}, storage_bound(DType::F32, 2 * ulps));
    // Differences of terms up to scale * |dw| * s / sum: an absolute bound.
    const auto gradient = rig.read(d_logits);
    const auto expected_gradient =
        reference::router_input_grad(to_double(d_weights), {}, expected, chosen, shape);
    check.elements("input gradient", gradient, expected_gradient, {c.tokens, c.experts},
                   storage_bound(DType::F32, 2 * ulps, c.scale * (c.normalise ? 2 : 1)));
    if (!c.normalise || c.top_k > 1) // otherwise it is 0 but for rounding
        check.number("whole input gradient", reference::calc_diff(gradient, expected_gradient), 0,
                     1e-9);
    check.exact("counts", rig.read<std::uint64_t>(counts),
                reference::count_experts(chosen, c.experts));
}

/// The balance loss of sequences: its gradient joins the one that comes through the weights.
void check_balance_loss(Check& check, const OpRig& rig, const RouterCase& c) {
    check.begin_case(c.name);
    const std::uint64_t sequences = sequences_of(c), length = c.tokens / sequences;
    const auto logits = reference::random_f32(c.tokens * c.experts, 1, -4, 4);
    const auto d_weights = reference::random_f32(c.tokens * c.top_k, 3);
    const OpTensor logits_t = rig.tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor d_weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor counts = rig.result(DType::U32, {sequences, c.experts});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor without = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor plain = rig.result(DType::F32, {c.tokens, c.experts});
    // Of the size of the gradient that comes through the weights.
    const double alpha = 2.0 * static_cast<double>(c.tokens);
    const double weight =
        alpha * static_cast<double>(c.experts) / static_cast<double>(c.top_k * length * c.tokens);
    rig.run([&](Recording& recording) {
        const auto options = options_of(c);
        ops::router_forward(recording, logits_t, {}, scores, ids, weights, options);
        ops::expert_counts(recording, ids, counts, false);
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options,
                          {counts, static_cast<float>(weight)});
        ops::router_dgrad(recording, d_weights_t, ids, scores, without, options, {counts, 0});
        ops::router_dgrad(recording, d_weights_t, ids, scores, plain, options);
    });
    check.exact("a weight of 0", rig.read(without), rig.read(plain));

    const reference::RouterShape shape = shape_of(c);
    const auto chosen = rig.read<std::int32_t>(ids);
    const auto expected_scores = reference::router_scores(to_double(logits), shape);
    std::vector<std::uint64_t> expected_counts;
    for (std::uint64_t s = 0; s < sequences; ++s)
        for (const std::uint64_t count : reference::count_experts(
                 std::span(chosen).subspan(s * length * c.top_k, length * c.top_k), c.experts))
            expected_counts.push_back(count);
    check.exact("counts", rig.read<std::uint64_t>(counts), expected_counts);
    const auto balance =
        reference::balance_loss(expected_scores, chosen, shape, sequences, sequences, alpha);
    const auto expected = reference::router_input_grad(to_double(d_weights), balance.dscores,
                                                       expected_scores, chosen, shape);
    double largest = c.scale * (c.normalise ? 2 : 1);
    for (const double value : balance.dscores)
        largest = std::max(largest, std::abs(value));
    const double ulps = 8 + static_cast<double>(c.experts);
    const auto actual = rig.read(d_logits), through_weights = rig.read(plain);
    check.elements("input gradient", actual, expected, {c.tokens, c.experts},
                   storage_bound(DType::F32, 4 * ulps, largest));
    if (c.top_k == c.experts) { // all are loaded alike: nothing to balance
        check.number("whole input gradient", reference::calc_diff(actual, through_weights), 0,
                     1e-9);
        return;
    }
    check.number("whole input gradient", reference::calc_diff(actual, expected), 0, 1e-9);
    check.that("the balance shows", reference::calc_diff(through_weights, expected) > 1e-3,
               "the gradient is the same without it");
}

void check_balance(Check& check, const OpRig& rig) {
    check.begin_case("6 experts");
    const std::vector<std::uint32_t> counts{10, 20, 15, 15, 0, 30};
    const std::vector<float> bias{0, 1, -1, 0.5f, 0, 0};
    const OpTensor counts_t = rig.tensor(DType::U32, {6}, counts);
    const OpTensor bias_t = rig.tensor(DType::F32, {6}, bias);
    rig.run(
        [&](Recording& recording) { ops::router_bias_update(recording, counts_t, bias_t, 0.25f); });
    const std::vector<std::uint64_t> wide(counts.begin(), counts.end());
    check.exact("bias", rig.read(bias_t), reference::updated_bias(to_double(bias), wide, 0.25));
}

} // namespace

void add_router_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_router_table(checks, depth, "router", check_router);
    add_router_table(checks, depth, "router balance loss", check_balance_loss);
    checks.push_back({"ops", "router balance", check_balance});
}

} // namespace bellows::checks
