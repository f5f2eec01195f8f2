// SPDX-License-Identifier: MIT
// The router with its gradient, its counts and balance rule, and the movement of rows to experts
// and back.
#include "app/selftest/suite.hpp"

#include "reference/router.hpp"

#include <bellows/engine/ops.hpp>

#include <algorithm>

namespace bellows::selftest {

namespace {

using reference::to_double;

struct RouterCase {
    const char* name;
    std::uint64_t tokens, experts, top_k;
    std::uint32_t groups, group_top_k;
    bool softmax, normalise, bias;
    double scale;
};

constexpr RouterCase kRouterCases[] = {
    {"one token", 1, 4, 1, 1, 1, false, true, false, 1},
    {"all chosen", 7, 5, 5, 1, 1, false, true, true, 1},
    {"odd", 33, 13, 3, 1, 1, false, false, true, 0.5},
    {"v2-lite", 130, 64, 6, 1, 1, true, false, false, 1},
    {"v2 with groups", 65, 40, 6, 8, 3, true, false, false, 16},
    {"v3", 100, 256, 8, 8, 4, false, true, true, 2.5},
};

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
    check.elements("input gradient", rig.read(d_logits),
                   reference::router_input_grad(to_double(d_weights), {}, expected, chosen, shape),
                   {c.tokens, c.experts},
                   storage_bound(DType::F32, 2 * ulps, c.scale * (c.normalise ? 2 : 1)));
    check.exact("counts", rig.read<std::uint64_t>(counts),
                reference::count_experts(chosen, c.experts));
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

struct MoeCase {
    std::uint64_t tokens, top_k, experts, columns;
    std::uint32_t alignment;
    int absent_percent; ///< slots that are not here
};

constexpr MoeCase kMoeCases[] = {
    {1, 1, 1, 4, 1, 0},      {5, 2, 3, 8, 4, 20},      {77, 3, 7, 20, 1, 30},
    {300, 6, 8, 40, 16, 25}, {11, 2, 64, 12, 128, 50}, {6, 2, 4, 8, 16, 100},
    {4500, 4, 5, 4, 8, 10},
};

struct MoeTensors {
    MoeTensors(const OpRig& rig, const MoeCase& c)
        : counts(rig.result(DType::U32, {c.experts})),
          offsets(rig.result(DType::U32, {c.experts + 1})),
          row_to_slot(rig.result(DType::I32,
                                 {ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment)})),
          slot_to_row(rig.result(DType::I32, {c.tokens, c.top_k})),
          workspace(rig.workspace(ops::moe_layout_workspace_bytes(c.tokens, c.top_k, c.experts))),
          layout{counts, offsets, row_to_slot, slot_to_row, c.alignment} {}

    OpTensor counts, offsets, row_to_slot, slot_to_row;
    Buffer workspace;
    ops::MoeLayout layout;
};

std::vector<std::int32_t> some_experts(const MoeCase& c) {
    auto ids = reference::random_indices(c.tokens * c.top_k, 11, c.experts);
    const auto absent = reference::random_indices(ids.size(), 12, 100);
    for (std::size_t i = 0; i < ids.size(); ++i)
        ids[i] = absent[i] < c.absent_percent ? -1 : ids[i];
    return ids;
}

void check_rows(Check& check, const OpRig& rig, DType dtype, const MoeCase& c) {
    check.begin_case(std::to_string(c.tokens) + " tokens, top " + std::to_string(c.top_k) + " of " +
                     std::to_string(c.experts) + ", alignment " + std::to_string(c.alignment));
    const auto ids = some_experts(c);
    const auto permutation = reference::make_permutation(ids, c.top_k, c.experts, c.alignment);
    const std::uint64_t capacity = ops::moe_capacity(c.tokens, c.top_k, c.experts, c.alignment);
    const auto x = OpRig::random(dtype, c.tokens * c.columns, 1);
    const auto y = OpRig::random(dtype, capacity * c.columns, 2);
    const auto before = OpRig::random(dtype, c.tokens * c.columns, 3);
    const auto weights = reference::random_f32(c.tokens * c.top_k, 4, 0, 1);
    const OpTensor ids_t = rig.tensor(DType::I32, {c.tokens, c.top_k}, ids);
    const OpTensor x_t = rig.tensor(dtype, {c.tokens, c.columns}, x);
    const OpTensor y_t = rig.tensor(dtype, {capacity, c.columns}, y);
    const OpTensor weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, weights);
    const OpTensor rows = rig.result(dtype, {capacity, c.columns});
    const OpTensor d_rows = rig.result(dtype, {capacity, c.columns});
    const OpTensor added = rig.tensor(dtype, {c.tokens, c.columns}, before);
    const OpTensor d_weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor row_weights = rig.result(DType::F32, {capacity});
    const OpTensor slot_weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const MoeTensors t(rig, c);
    rig.run([&](Recording& recording) {
        ops::moe_layout(recording, ids_t, t.layout, t.workspace.view());
        ops::moe_gather(recording, x_t, t.layout, {}, rows);
        ops::moe_gather(recording, x_t, t.layout, weights_t, d_rows);
        ops::moe_unpermute(recording, y_t, t.layout, weights_t, added, true);
        ops::moe_weights_dgrad(recording, y_t, t.layout, x_t, d_weights);
        ops::moe_scalars_to_rows(recording, weights_t, t.layout, row_weights);
        ops::moe_scalars_to_slots(recording, row_weights, t.layout, slot_weights);
    });

    check.exact("placement", rig.read<std::uint64_t>(t.counts), permutation.counts);
    check.exact("placement", rig.read<std::uint64_t>(t.offsets), permutation.starts);
    check.exact("placement", rig.read<std::int64_t>(t.slot_to_row), permutation.row_of_slot);
    const std::uint64_t used = permutation.rows();
    const auto head = [&](const char* part, std::vector<float> values) {
        check.untouched_from(part, values, used * c.columns);
        values.resize(used * c.columns);
        return values;
    };
    const auto xd = to_double(x), wd = to_double(weights);
    auto yd = to_double(y);
    yd.resize(used * c.columns);
    check.exact("gather", head("gather", rig.read(rows)),
                reference::permute(xd, permutation, c.columns));
    const auto expected = reference::unpermute_input_grad(xd, yd, wd, permutation, c.columns);
    check.elements("gather with weights", head("gather with weights", rig.read(d_rows)),
                   expected.drows, {used, c.columns}, storage_bound(dtype, 1));
    const auto terms = static_cast<double>(c.top_k), columns = static_cast<double>(c.columns);
    auto sum = reference::unpermute(yd, wd, permutation, c.columns);
    reference::accumulate(sum, to_double(before));
    check.elements("unpermute", rig.read(added), sum, {c.tokens, c.columns},
                   storage_bound(dtype, terms + 1, terms + 1));
    check.elements("gradient of the weights", rig.read(d_weights), expected.dweights,
                   {c.tokens, c.top_k}, storage_bound(DType::F32, columns, columns));
    std::vector<float> present = weights;
    for (std::size_t i = 0; i < present.size(); ++i)
        present[i] = ids[i] < 0 ? 0.0f : present[i];
    check.exact("scalars", rig.read(slot_weights), present);
}

} // namespace

void add_moe_checks(std::vector<OpCheck>& checks) {
    checks.push_back({"ops", "router", [](Check& check, const OpRig& rig) {
                          for (const RouterCase& c : kRouterCases)
                              check_router(check, rig, c);
                      }});
    checks.push_back({"ops", "router balance", check_balance});
    for (const DType dtype : {DType::F32, DType::BF16})
        checks.push_back(
            {"ops", with_storage("moe rows", dtype), [dtype](Check& check, const OpRig& rig) {
                 for (const MoeCase& c : kMoeCases)
                     check_rows(check, rig, dtype, c);
             }});
}

} // namespace bellows::selftest
