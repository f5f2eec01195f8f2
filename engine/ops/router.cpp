// SPDX-License-Identifier: MIT
#include "arguments.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/router.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::ops {

namespace {

constexpr std::uint32_t kMaxRouterGroups = 32;

void check_options(const Arguments& arguments, const RouterOptions& options, std::uint64_t experts,
                   std::uint64_t top_k) {
    arguments.require(experts > 0, "there are no experts");
    arguments.require(options.groups >= 1 && options.groups <= kMaxRouterGroups &&
                          experts % options.groups == 0,
                      std::to_string(experts) + " experts in " + std::to_string(options.groups) +
                          " groups: wanted are 1 to 32 equal groups");
    arguments.require(options.group_top_k >= 1 && options.group_top_k <= options.groups,
                      "group_top_k is " + std::to_string(options.group_top_k) + " of " +
                          std::to_string(options.groups) + " groups");
    arguments.require(options.group_score_top == 1 || options.group_score_top == 2,
                      "group_score_top is " + std::to_string(options.group_score_top) +
                          ", wanted is 1 or 2");
    const std::uint64_t eligible = experts / options.groups * options.group_top_k;
    arguments.require(top_k >= 1 && top_k <= eligible, "top_k is " + std::to_string(top_k) +
                                                           " of " + std::to_string(eligible) +
                                                           " experts that can be chosen");
}

/// A GPU has far more invocations than tokens: a workgroup takes one. The grid of plan_rows()
/// suits; its width follows the experts, one to four for each invocation of the usual models.
RowPlan plan_router(const Recording& recording, std::uint64_t tokens, std::uint64_t experts,
                    std::uint64_t top_k) {
    RowPlan plan = plan_rows(recording, tokens, experts, RowWork::Reduction);
    if (plan.row_per_workgroup != 0) {
        plan.local_size = experts > 64 || top_k > 32 ? 64 : 32;
        if (experts > kMostSharedExperts || top_k > kMostSharedTopK) {
            plan.row_per_workgroup = 0;
        }
    }
    return plan;
}

/// Counts of equal runs of tokens; returns how many runs there are.
std::uint64_t check_runs(const Arguments& arguments, const TensorView& counts, std::uint64_t tokens,
                         std::uint64_t columns) {
    arguments.rank("counts", counts, 2);
    const std::uint64_t runs = counts.extent[0];
    arguments.require(runs > 0 && tokens % runs == 0, std::to_string(tokens) + " tokens in " +
                                                          std::to_string(runs) +
                                                          " sequences of equal length");
    arguments.tensor("counts", counts, DType::U32, {runs, columns});
    return runs;
}

std::uint64_t check_balance(const Arguments& arguments, const TensorView& counts,
                            const BalanceCounts& what, std::uint64_t tokens,
                            std::uint64_t experts) {
    arguments.require(what.devices == 0 || experts % what.devices == 0,
                      std::to_string(experts) + " experts on " + std::to_string(what.devices) +
                          " devices of equal size");
    const std::uint64_t runs = check_runs(arguments, counts, tokens, what.columns(experts));
    arguments.require(!what.tokens || runs == 1,
                      "tokens are counted in one run, not in " + std::to_string(runs));
    return runs;
}

} // namespace

bool router_by_subgroup(const Device& device, std::uint64_t experts, std::uint64_t top_k) {
    constexpr std::uint64_t kMostOfInvocation = 16, kLeast = 8, kMost = 64;
    using Kernel = kernels::RouterForward;
    const std::uint64_t size = device.info().subgroup_size;
    return size >= kLeast && size <= kMost && experts <= kMostOfInvocation * size &&
           top_k <= size &&
           device.why_not(Kernel::info(), static_cast<std::uint32_t>(Kernel::Variant::by_subgroup))
               .empty();
}

void check_router_options(const char* op, const RouterOptions& options, std::uint64_t experts,
                          std::uint64_t top_k) {
    check_options(Arguments(op), options, experts, top_k);
}

void router_forward(Recording& recording, const TensorView& logits, const TensorView& bias,
                    const TensorView& scores, const TensorView& topk_ids,
                    const TensorView& topk_weights, const RouterOptions& options) {
    const Arguments arguments("router_forward");
    arguments.rank("logits", logits, 2);
    arguments.rank("topk_ids", topk_ids, 2);
    const std::uint64_t tokens = logits.extent[0], experts = logits.extent[1];
    const std::uint64_t top_k = topk_ids.extent[1];
    check_options(arguments, options, experts, top_k);
    arguments.tensor("logits", logits, DType::F32, {tokens, experts});
    if (bias.buffer) {
        arguments.tensor("bias", bias, DType::F32, {experts});
    }
    arguments.tensor("scores", scores, DType::F32, {tokens, experts});
    arguments.tensor("topk_ids", topk_ids, DType::I32, {tokens, top_k});
    arguments.tensor("topk_weights", topk_weights, DType::F32, {tokens, top_k});
    if (tokens == 0) {
        return;
    }
    RowPlan plan = plan_router(recording, tokens, experts, top_k);
    const bool by_subgroup =
        plan.row_per_workgroup != 0 && router_by_subgroup(recording.device(), experts, top_k);
    const std::uint32_t subgroup = recording.device().info().subgroup_size;
    if (by_subgroup)
        plan.local_size = std::max<std::uint32_t>(subgroup, 32);
    using Variant = kernels::RouterForward::Variant;
    const std::uint64_t shared = plan.row_per_workgroup != 0 ? experts : 1;
    const BufferView logits_memory = arguments.memory("logits", logits, 1);
    recording.dispatch(
        kernels::RouterForward{.variant = by_subgroup ? Variant::by_subgroup : Variant::f32,
                               .constants = {.local_size = plan.local_size,
                                             .row_per_workgroup = plan.row_per_workgroup,
                                             .shared_experts = arguments.u32("experts", shared),
                                             .subgroup = by_subgroup ? subgroup : 32u},
                               .logits = logits_memory,
                               .bias = arguments.memory_or("bias", bias, logits_memory, 1),
                               .scores = arguments.memory("scores", scores, 1),
                               .topk_ids = arguments.memory("topk_ids", topk_ids, 1),
                               .topk_weights = arguments.memory("topk_weights", topk_weights, 1),
                               .tokens = arguments.u32("tokens", tokens),
                               .experts = arguments.u32("experts", experts),
                               .top_k = arguments.u32("top_k", top_k),
                               .groups = options.groups,
                               .group_top_k = options.group_top_k,
                               .group_score_top = options.group_score_top,
                               .use_softmax =
                                   options.score == RouterOptions::Score::Softmax ? 1u : 0u,
                               .normalise = options.normalise ? 1u : 0u,
                               .has_bias = bias.buffer ? 1u : 0u,
                               .route_scale = options.route_scale},
        plan.groups);
}

void router_dgrad(Recording& recording, const TensorView& d_topk_weights,
                  const TensorView& topk_ids, const TensorView& scores, const TensorView& d_logits,
                  const RouterOptions& options, const RouterBalance& balance,
                  const RouterZLoss& z_loss) {
    const Arguments arguments("router_dgrad");
    arguments.rank("scores", scores, 2);
    arguments.rank("topk_ids", topk_ids, 2);
    const std::uint64_t tokens = scores.extent[0], experts = scores.extent[1];
    const std::uint64_t top_k = topk_ids.extent[1];
    check_options(arguments, options, experts, top_k);
    arguments.tensor("d_topk_weights", d_topk_weights, DType::F32, {tokens, top_k});
    arguments.tensor("topk_ids", topk_ids, DType::I32, {tokens, top_k});
    arguments.tensor("scores", scores, DType::F32, {tokens, experts});
    arguments.tensor("d_logits", d_logits, DType::F32, {tokens, experts});
    const bool balanced = balance.any(), has_z_loss = z_loss.weight != 0;
    const BalanceCounts& counted = balance.counted;
    if (has_z_loss) {
        arguments.tensor("logits", z_loss.logits, DType::F32, {tokens, experts});
    }
    if (tokens == 0) {
        return;
    }
    const std::uint64_t runs =
        balanced ? check_balance(arguments, balance.counts, counted, tokens, experts) : 1;
    arguments.require(counted.devices > 0 ||
                          (balance.device_weight == 0 && balance.communication_weight == 0),
                      "losses of devices need their counts");
    const RowPlan plan = plan_router(recording, tokens, experts, 1);
    const BufferView scores_memory = arguments.memory("scores", scores, 1);
    recording.dispatch(
        kernels::RouterDgrad{
            .constants = {.local_size = plan.local_size,
                          .row_per_workgroup = plan.row_per_workgroup,
                          .balance = balanced ? 1u : 0u,
                          .devices = balanced ? counted.devices : 0u,
                          .accumulated = balanced && counted.tokens ? 1u : 0u,
                          .z_loss = has_z_loss ? 1u : 0u},
            .d_topk_weights = arguments.memory("d_topk_weights", d_topk_weights, 1),
            .topk_ids = arguments.memory("topk_ids", topk_ids, 1),
            .scores = scores_memory,
            .counts = balanced ? arguments.memory("counts", balance.counts, 1) : scores_memory,
            .logits = has_z_loss ? arguments.memory("logits", z_loss.logits, 1) : scores_memory,
            .d_logits = arguments.memory("d_logits", d_logits, 1),
            .tokens = arguments.u32("tokens", tokens),
            .experts = arguments.u32("experts", experts),
            .top_k = arguments.u32("top_k", top_k),
            .use_softmax = options.score == RouterOptions::Score::Softmax ? 1u : 0u,
            .normalise = options.normalise ? 1u : 0u,
            .route_scale = options.route_scale,
            .run_tokens = arguments.u32("tokens of a run", tokens / runs),
            .run_counts = arguments.u32("counts of a run", counted.columns(experts)),
            .balance_weight = balance.weight,
            .device_weight = balance.device_weight,
            .communication_weight = balance.communication_weight,
            .z_weight = z_loss.weight},
        plan.groups);
}

void balance_counts(Recording& recording, const TensorView& scores, const TensorView& topk_ids,
                    const TensorView& counts, const BalanceCounts& what) {
    const Arguments arguments("balance_counts");
    arguments.rank("scores", scores, 2);
    arguments.rank("topk_ids", topk_ids, 2);
    const std::uint64_t tokens = scores.extent[0], experts = scores.extent[1];
    const std::uint64_t top_k = topk_ids.extent[1];
    arguments.require(experts > 0, "there are no experts");
    arguments.tensor("scores", scores, DType::F32, {tokens, experts});
    arguments.tensor("topk_ids", topk_ids, DType::I32, {tokens, top_k});
    if (tokens == 0) {
        return;
    }
    const std::uint64_t runs = check_balance(arguments, counts, what, tokens, experts);
    const RowPlan plan = plan_router(recording, tokens, experts, 1);
    recording.dispatch(
        kernels::BalanceCounts{.constants = {.local_size = plan.local_size,
                                             .row_per_workgroup = plan.row_per_workgroup,
                                             .of_scores = what.of_scores ? 1u : 0u,
                                             .count_tokens = what.tokens ? 1u : 0u},
                               .scores = arguments.memory("scores", scores, 1),
                               .topk_ids = arguments.memory("topk_ids", topk_ids, 1),
                               .counts = arguments.memory("counts", counts, 1),
                               .tokens = arguments.u32("tokens", tokens),
                               .experts = arguments.u32("experts", experts),
                               .top_k = arguments.u32("top_k", top_k),
                               .run_tokens = arguments.u32("tokens of a run", tokens / runs),
                               .run_counts =
                                   arguments.u32("counts of a run", what.columns(experts)),
                               .devices = what.devices},
        plan.groups);
}

void router_capacity(Recording& recording, const TensorView& scores, const TensorView& topk_ids,
                     const TensorView& kept_ids, std::uint32_t groups, std::uint64_t capacity,
                     const TensorView& spared) {
    const Arguments arguments("router_capacity");
    arguments.rank("scores", scores, 2);
    arguments.rank("topk_ids", topk_ids, 2);
    const std::uint64_t tokens = scores.extent[0], experts = scores.extent[1];
    const std::uint64_t top_k = topk_ids.extent[1], slots = tokens * top_k;
    arguments.require(groups > 0 && experts > 0 && experts % groups == 0,
                      std::to_string(experts) + " experts in " + std::to_string(groups) +
                          " groups of equal size");
    arguments.tensor("scores", scores, DType::F32, {tokens, experts});
    arguments.tensor("topk_ids", topk_ids, DType::I32, {tokens, top_k});
    arguments.tensor("kept_ids", kept_ids, DType::I32, {tokens, top_k});
    if (slots == 0) {
        return;
    }
    std::uint64_t run_slots = 0;
    if (spared.rank > 0) {
        const std::uint64_t runs = spared.extent[0];
        arguments.tensor("spared", spared, DType::U32, {runs});
        arguments.require(runs > 0 && tokens % runs == 0, std::to_string(tokens) + " tokens in " +
                                                              std::to_string(runs) +
                                                              " runs of equal length");
        run_slots = slots / runs;
    }
    const DeviceInfo& device = recording.device().info();
    const BufferView ids = arguments.memory("topk_ids", topk_ids, 1);
    recording.dispatch(
        kernels::RouterCapacity{
            .constants = {.local_size = device.is_cpu
                                            ? 8u
                                            : std::min(1024u, device.max_workgroup_invocations)},
            .scores = arguments.memory("scores", scores, 1),
            .topk_ids = ids,
            .spared = run_slots > 0 ? arguments.memory("spared", spared, 1) : ids,
            .kept_ids = arguments.memory("kept_ids", kept_ids, 1),
            .slots = arguments.u32("slots", slots),
            .experts = arguments.u32("experts", experts),
            .top_k = arguments.u32("top_k", top_k),
            .group_experts = arguments.u32("group_experts", experts / groups),
            .capacity = arguments.u32("capacity", std::min(capacity, slots)),
            .run_slots = arguments.u32("slots of a run", run_slots)},
        {.x = std::min(groups, device.max_workgroup_count[0])});
}

void expert_counts(Recording& recording, const TensorView& topk_ids, const TensorView& counts,
                   bool accumulate) {
    const Arguments arguments("expert_counts");
    arguments.rank("topk_ids", topk_ids, 2);
    arguments.tensor("topk_ids", topk_ids, DType::I32, {topk_ids.extent[0], topk_ids.extent[1]});
    std::uint64_t sequences = 1, experts = counts.extent[0];
    if (counts.rank == 2) {
        experts = counts.extent[1];
        sequences = check_runs(arguments, counts, topk_ids.extent[0], experts);
    } else {
        arguments.rank("counts", counts, 1);
        arguments.tensor("counts", counts, DType::U32, {experts});
    }
    const BufferView counts_memory = arguments.memory("counts", counts, 1);
    if (!accumulate) {
        recording.fill(counts_memory, 0);
    }
    const std::uint64_t slots = topk_ids.num_elements();
    if (slots == 0) {
        return;
    }
    const FlatPlan plan = plan_flat(recording, slots, 16);
    const BufferView ids = arguments.memory("topk_ids", topk_ids, 1);
    recording.dispatch(
        kernels::ExpertCounts{.constants = {.local_size = plan.local_size},
                              .topk_ids = ids,
                              .token_count = arguments.row_count_or(topk_ids, ids),
                              .counts = counts_memory,
                              .slots = arguments.u32("slots", slots),
                              .top_k = arguments.u32("top_k", topk_ids.extent[1]),
                              .run_slots = arguments.u32("run_slots", slots / sequences),
                              .experts = arguments.u32("experts", experts),
                              .has_token_count = topk_ids.row_count ? 1u : 0u},
        plan.groups);
}

void router_bias_update(Recording& recording, const TensorView& counts, const TensorView& bias,
                        float rate) {
    const Arguments arguments("router_bias_update");
    arguments.rank("counts", counts, 1);
    const std::uint64_t experts = counts.extent[0];
    arguments.require(experts > 0, "there are no experts");
    arguments.tensor("counts", counts, DType::U32, {experts});
    arguments.tensor("bias", bias, DType::F32, {experts});
    const FlatPlan plan = plan_exact(recording, experts);
    recording.dispatch(kernels::RouterBiasUpdate{.constants = {.local_size = plan.local_size},
                                                 .counts = arguments.memory("counts", counts, 1),
                                                 .bias = arguments.memory("bias", bias, 1),
                                                 .experts = arguments.u32("experts", experts),
                                                 .rate = rate},
                       plan.groups);
}

} // namespace bellows::ops
