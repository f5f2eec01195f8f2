// SPDX-License-Identifier: MIT
// The router with its gradient, its counts and balance rule.
#include "checks/families.hpp"

#include "reference/router.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/kernels/kernels.hpp>

namespace bellows::checks {

namespace {

using reference::to_double;

struct RouterCase {
    const char* name;
    std::uint64_t tokens, experts, top_k;
    std::uint32_t groups, group_top_k;
    bool softmax, normalise, bias;
    double scale;
    Depth depth = Depth::Quick;
};

constexpr auto kRouterCases = std::to_array<RouterCase>({
    {"one token", 1, 4, 1, 1, 1, false, true, false, 1},
    {"all chosen", 7, 5, 5, 1, 1, false, true, true, 1},
    {"odd", 33, 13, 3, 1, 1, false, false, true, 0.5},
    {"v2-lite", 130, 64, 6, 1, 1, true, false, false, 1},
    {"v2 with groups", 65, 40, 6, 8, 3, true, false, false, 16},
    {"v3", 100, 256, 8, 8, 4, false, true, true, 2.5},
    {"groups of one", 9, 12, 4, 12, 5, true, true, false, 1, Depth::Full},
    {"sigmoid, groups of one", 9, 12, 4, 12, 5, false, true, true, 1, Depth::Full},
    {"softmax, normalised", 50, 31, 4, 1, 1, true, true, true, 1, Depth::Full},
});

ops::RouterOptions options_of(const RouterCase& c) {
    return {.score =
                c.softmax ? ops::RouterOptions::Score::Softmax : ops::RouterOptions::Score::Sigmoid,
            .groups = c.groups,
            .group_top_k = c.group_top_k,
            .group_score_top = c.softmax ? 1u : 2u,
            .normalise = c.normalise,
            .route_scale = static_cast<float>(c.scale)};
}

reference::RouterShape shape_of(const RouterCase& c) {
    return {.experts = c.experts,
            .top_k = c.top_k,
            .n_group = c.groups,
            .topk_group = c.group_top_k,
            .score = c.softmax ? ScoreFunction::Softmax : ScoreFunction::Sigmoid,
            .normalize = c.normalise,
            .scale = c.scale};
}

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

/// What one form of the kernels gives.
struct FormResult {
    std::vector<std::int32_t> ids;
    std::vector<float> weights, d_logits;
};

FormResult run_form(const OpRig& rig, const RouterCase& c, bool by_workgroup) {
    const auto word = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto tensor = [&](std::uint64_t columns, std::uint64_t seed, double most) {
        return rig.tensor(DType::F32, {c.tokens, columns},
                          reference::random_f32(c.tokens * columns, seed, -most, most));
    };
    const OpTensor logits = tensor(c.experts, 4, 4), d_weights = tensor(c.top_k, 6, 1);
    const OpTensor bias =
        rig.tensor(DType::F32, {c.experts}, reference::random_f32(c.experts, 5, -0.1, 0.1));
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const std::uint32_t softmax = c.softmax ? 1 : 0, normalise = c.normalise ? 1 : 0;
    const std::uint32_t row_per_workgroup = by_workgroup ? 1 : 0;
    rig.run([&](Recording& recording) {
        recording.dispatch(
            kernels::RouterForward{
                .constants = {.local_size = 32,
                              .row_per_workgroup = row_per_workgroup,
                              .shared_experts = by_workgroup ? word(c.experts) : 1},
                .logits = logits.view.buffer,
                .bias = bias.view.buffer,
                .scores = scores.view.buffer,
                .topk_ids = ids.view.buffer,
                .topk_weights = weights.view.buffer,
                .tokens = word(c.tokens),
                .experts = word(c.experts),
                .top_k = word(c.top_k),
                .groups = c.groups,
                .group_top_k = c.group_top_k,
                .group_score_top = 2,
                .use_softmax = softmax,
                .normalise = normalise,
                .has_bias = 1,
                .route_scale = static_cast<float>(c.scale)},
            {.x = 5}); // fewer workgroups than tokens: they loop
        recording.dispatch(
            kernels::RouterDgrad{
                .constants = {.local_size = 32, .row_per_workgroup = row_per_workgroup},
                .d_topk_weights = d_weights.view.buffer,
                .topk_ids = ids.view.buffer,
                .scores = scores.view.buffer,
                .d_logits = d_logits.view.buffer,
                .tokens = word(c.tokens),
                .experts = word(c.experts),
                .top_k = word(c.top_k),
                .use_softmax = softmax,
                .normalise = normalise,
                .route_scale = static_cast<float>(c.scale)},
            {.x = 5});
    });
    return {rig.read<std::int32_t>(ids), rig.read(weights), rig.read(d_logits)};
}

/// The kernels have two forms, of which the ops take one per device; this runs both.
void check_forms(Check& check, const OpRig& rig, const RouterCase& c) {
    check.begin_case(c.name);
    const FormResult one = run_form(rig, c, false), other = run_form(rig, c, true);
    check.exact("choice", other.ids, one.ids);
    const double ulps = c.softmax ? 8 + static_cast<double>(c.experts) : 0; // another order of sum
    check.elements("weights", other.weights, one.weights, {c.tokens, c.top_k},
                   storage_bound(DType::F32, 2 * ulps));
    check.elements("input gradient", other.d_logits, one.d_logits, {c.tokens, c.experts},
                   storage_bound(DType::F32, 2 * ulps, 2 * c.scale));
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
    const auto add = [&](const char* name, void (*body)(Check&, const OpRig&, const RouterCase&)) {
        checks.push_back({"ops", name, [=](Check& check, const OpRig& rig) {
                              for (const RouterCase& c : kRouterCases)
                                  if (c.depth <= depth)
                                      body(check, rig, c);
                          }});
    };
    add("router", check_router);
    if (depth == Depth::Full)
        add("router, both forms", check_forms);
    checks.push_back({"ops", "router balance", check_balance});
}

} // namespace bellows::checks
