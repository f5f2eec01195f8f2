// SPDX-License-Identifier: MIT
// The router's kernels have two forms, of which the ops take one per device; here both run.
#include "verify/checks/router_cases.hpp"

#include <bellows/kernels/kernels.hpp>

namespace bellows::checks {

namespace {

/// What one form of the kernels gives.
struct FormResult {
    std::vector<std::int32_t> ids;
    std::vector<float> weights, d_logits;
};

FormResult run_form(const OpRig& rig, const RouterCase& c, bool by_workgroup, bool by_subgroup,
                    bool balance) {
    const auto word = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto tensor = [&](std::uint64_t columns, std::uint64_t seed, double most) {
        return rig.tensor(DType::F32, {c.tokens, columns},
                          reference::random_f32(c.tokens * columns, seed, -most, most));
    };
    const OpTensor logits = tensor(c.experts, 4, 4), d_weights = tensor(c.top_k, 6, 1);
    const OpTensor bias =
        rig.tensor(DType::F32, {c.experts}, reference::random_f32(c.experts, 5, -0.1, 0.1));
    const std::uint64_t sequences = sequences_of(c);
    std::vector<std::uint32_t> loads(sequences * c.experts);
    for (std::size_t i = 0; i < loads.size(); ++i)
        loads[i] = static_cast<std::uint32_t>(i * 7 % 11);
    const OpTensor counts = rig.tensor(DType::U32, {sequences, c.experts}, loads);
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const std::uint32_t softmax = c.softmax ? 1 : 0, normalise = c.normalise ? 1 : 0;
    const std::uint32_t row_per_workgroup = by_workgroup ? 1 : 0;
    rig.run([&](Recording& recording) {
        recording.dispatch(
            kernels::RouterForward{
                .variant = by_subgroup ? kernels::RouterForward::Variant::by_subgroup
                                       : kernels::RouterForward::Variant::f32,
                .constants = {.local_size = 64,
                              .row_per_workgroup = row_per_workgroup,
                              .shared_experts = by_workgroup ? word(c.experts) : 1,
                              .subgroup = by_subgroup ? rig.device().info().subgroup_size : 32},
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
            kernels::RouterDgrad{.constants = {.local_size = 32,
                                               .row_per_workgroup = row_per_workgroup,
                                               .balance = balance ? 1u : 0u},
                                 .d_topk_weights = d_weights.view.buffer,
                                 .topk_ids = ids.view.buffer,
                                 .scores = scores.view.buffer,
                                 .counts = counts.view.buffer,
                                 .logits = logits.view.buffer,
                                 .d_logits = d_logits.view.buffer,
                                 .tokens = word(c.tokens),
                                 .experts = word(c.experts),
                                 .top_k = word(c.top_k),
                                 .use_softmax = softmax,
                                 .normalise = normalise,
                                 .route_scale = static_cast<float>(c.scale),
                                 .run_tokens = word(c.tokens / sequences),
                                 .run_counts = word(c.experts),
                                 .balance_weight = 0.25f},
            {.x = 5});
    });
    return {rig.read<std::int32_t>(ids), rig.read(weights), rig.read(d_logits)};
}

void check_forms(Check& check, const OpRig& rig, const RouterCase& c) {
    const double ulps = 8 + static_cast<double>(c.experts);
    for (const bool balance : {false, true}) {
        check.begin_case(std::string(c.name) + (balance ? " with balance loss" : ""));
        const FormResult one = run_form(rig, c, false, false, balance);
        const FormResult other = run_form(rig, c, true, false, balance);
        // The same bits but for sums, whose order differs.
        const double of_weights = c.softmax ? 2 * ulps : 0;
        const double of_gradient = c.softmax || balance ? 2 * ulps : 0;
        if (ops::router_by_subgroup(rig.device(), c.experts, c.top_k)) {
            const FormResult third = run_form(rig, c, true, true, balance);
            check.exact("choice by subgroups", third.ids, other.ids);
            check.exact("weights by subgroups", third.weights, other.weights);
        }
        check.exact("choice", other.ids, one.ids);
        check.elements("weights", other.weights, one.weights, {c.tokens, c.top_k},
                       storage_bound(DType::F32, of_weights));
        check.elements("input gradient", other.d_logits, one.d_logits, {c.tokens, c.experts},
                       storage_bound(DType::F32, of_gradient, 2 * c.scale + (balance ? 3 : 0)));
    }
}

} // namespace

void add_router_form_checks(std::vector<OpCheck>& checks, Depth depth) {
    if (depth == Depth::Full)
        add_router_table(checks, depth, "router, both forms", check_forms);
}

} // namespace bellows::checks
