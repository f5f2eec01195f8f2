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
    std::vector<std::uint32_t> counts;
};

/// The router's losses beside the one that comes through the weights.
enum class Losses { None, Balance, All };

FormResult run_form(const OpRig& rig, const RouterCase& c, bool by_workgroup, bool by_subgroup,
                    Losses losses) {
    const auto word = [](std::uint64_t value) { return static_cast<std::uint32_t>(value); };
    const auto tensor = [&](std::uint64_t columns, std::uint64_t seed, double most) {
        return rig.tensor(DType::F32, {c.tokens, columns},
                          reference::random_f32(c.tokens * columns, seed, -most, most));
    };
    const OpTensor logits = tensor(c.experts, 4, 4), d_weights = tensor(c.top_k, 6, 1);
    const OpTensor bias =
        rig.tensor(DType::F32, {c.experts}, reference::random_f32(c.experts, 5, -0.1, 0.1));
    const bool all = losses == Losses::All; // one run then, whose tokens are counted
    const std::uint64_t sequences = all ? 1 : sequences_of(c);
    const std::uint32_t devices = all && c.experts % 2 == 0 ? 2 : all ? 1 : 0;
    const std::uint64_t columns = c.experts + 2 * devices + (all ? 1 : 0);
    std::vector<std::uint32_t> loads(sequences * columns);
    for (std::size_t i = 0; i < loads.size(); ++i)
        loads[i] = static_cast<std::uint32_t>(i * 7 % 11);
    const OpTensor counts = rig.tensor(DType::U32, {sequences, columns}, loads);
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
            kernels::BalanceCounts{.constants = {.local_size = 32,
                                                 .row_per_workgroup = row_per_workgroup,
                                                 .of_scores = losses == Losses::Balance ? 0u : 1u,
                                                 .count_tokens = all ? 1u : 0u},
                                   .scores = scores.view.buffer,
                                   .topk_ids = ids.view.buffer,
                                   .counts = counts.view.buffer,
                                   .tokens = word(c.tokens),
                                   .experts = word(c.experts),
                                   .top_k = word(c.top_k),
                                   .run_tokens = word(c.tokens / sequences),
                                   .run_counts = word(columns),
                                   .devices = devices},
            {.x = 5});
        recording.dispatch(
            kernels::RouterDgrad{.constants = {.local_size = 32,
                                               .row_per_workgroup = row_per_workgroup,
                                               .balance = losses == Losses::None ? 0u : 1u,
                                               .devices = devices,
                                               .accumulated = all ? 1u : 0u,
                                               .z_loss = all ? 1u : 0u},
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
                                 .run_counts = word(columns),
                                 .balance_weight = 0.25f,
                                 .device_weight = 0.125f,
                                 .communication_weight = 0.0625f,
                                 .z_weight = 0.125f},
            {.x = 5});
    });
    return {rig.read<std::int32_t>(ids), rig.read(weights), rig.read(d_logits),
            rig.read<std::uint32_t>(counts)};
}

void check_forms(Check& check, const OpRig& rig, const RouterCase& c) {
    const double ulps = 8 + static_cast<double>(c.experts);
    for (const Losses losses : {Losses::None, Losses::Balance, Losses::All}) {
        const bool some = losses != Losses::None, all = losses == Losses::All;
        check.begin_case(std::string(c.name) + (all    ? " with all losses"
                                                : some ? " with balance loss"
                                                       : ""));
        const FormResult one = run_form(rig, c, false, false, losses);
        const FormResult other = run_form(rig, c, true, false, losses);
        // The same bits but for sums, whose order differs.
        const double of_weights = c.softmax ? 2 * ulps : 0;
        const double of_gradient = c.softmax || some ? 2 * ulps : 0;
        if (ops::router_by_subgroup(rig.device(), c.experts, c.top_k)) {
            const FormResult third = run_form(rig, c, true, true, losses);
            check.exact("choice by subgroups", third.ids, other.ids);
            check.exact("weights by subgroups", third.weights, other.weights);
        }
        check.exact("choice", other.ids, one.ids);
        // Sums of softmax differ in order, and few scores are that near each other.
        if (!c.softmax)
            check.exact("counts", other.counts, one.counts);
        check.elements("weights", other.weights, one.weights, {c.tokens, c.top_k},
                       storage_bound(DType::F32, of_weights));
        check.elements(
            "input gradient", other.d_logits, one.d_logits, {c.tokens, c.experts},
            storage_bound(DType::F32, of_gradient, 2 * c.scale + (some ? 3 : 0) + (all ? 64 : 0)));
    }
}

} // namespace

void add_router_form_checks(std::vector<OpCheck>& checks, Depth depth) {
    if (depth == Depth::Full)
        add_router_table(checks, depth, "router, both forms", check_forms);
}

} // namespace bellows::checks
