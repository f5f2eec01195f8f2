// SPDX-License-Identifier: MIT
// The router with its gradient and those of its losses, its counts and its balance rule.
#include "verify/checks/router_cases.hpp"

#include <bellows/base/mix.hpp>

#include <algorithm>
#include <bit>

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

/// Of how many devices the case's experts are, and to how many a token goes.
reference::BalanceShape balance_of(const RouterCase& c, BalanceLossKind kind, double alpha) {
    reference::BalanceShape balance{.kind = kind, .alpha = alpha};
    for (std::size_t devices = 2; devices <= c.experts; ++devices)
        if (c.experts % devices == 0) {
            balance.devices = devices;
            balance.devices_per_token = std::min<std::size_t>(devices, c.top_k);
            balance.device_alpha = alpha / 2;
            balance.communication_alpha = alpha / 3;
            break;
        }
    return balance;
}

std::vector<std::uint64_t> device_slots(const reference::BalanceCounts& counts,
                                        std::size_t devices) {
    std::vector<std::uint64_t> slots(devices, 0);
    for (std::size_t e = 0; e < counts.choices.size(); ++e)
        slots[e / (counts.choices.size() / devices)] += counts.choices[e];
    return slots;
}

/// The counts in the order in which the op writes them.
std::vector<std::uint64_t> in_columns(const std::vector<reference::BalanceCounts>& runs,
                                      const ops::BalanceCounts& counted) {
    std::vector<std::uint64_t> columns;
    const auto append = [&](const std::vector<std::uint64_t>& values) {
        columns.insert(columns.end(), values.begin(), values.end());
    };
    for (const reference::BalanceCounts& run : runs) {
        append(run.experts);
        if (counted.devices > 0) {
            append(device_slots(run, counted.devices));
            append(run.device_tokens);
        }
        if (counted.tokens)
            columns.push_back(run.tokens);
    }
    return columns;
}

/// The gradients of what else a router loses by: `alone` is the one that comes through the weights.
void compare_gradients(Check& check, const RouterCase& c, const std::vector<float>& actual,
                       const reference::Vector& expected, const std::vector<float>& alone,
                       double largest, bool shows) {
    const double ulps = 8 + static_cast<double>(c.experts);
    check.elements("input gradient", actual, expected, {c.tokens, c.experts},
                   storage_bound(DType::F32, 4 * ulps, largest));
    if (!shows) { // all are loaded alike: nothing to balance
        check.number("whole input gradient", reference::calc_diff(actual, alone), 0, 1e-9);
        return;
    }
    check.number("whole input gradient", reference::calc_diff(actual, expected), 0, 1e-9);
    check.that("the loss shows", reference::calc_diff(alone, expected) > 1e-3,
               "the gradient is the same without it");
}

/// A balance loss of whatever kind: its counts, and its gradient, which joins the one that comes
/// through the weights.
void check_balance_loss(Check& check, const OpRig& rig, const RouterCase& c, BalanceLossKind kind,
                        bool with_devices) {
    check.begin_case(std::string(c.name) + ", " + to_string(kind) +
                     (with_devices ? " with devices" : ""));
    const bool global = kind == BalanceLossKind::Global;
    const std::uint64_t runs = global ? 1 : sequences_of(c), length = c.tokens / runs;
    const auto logits = reference::random_f32(c.tokens * c.experts, 1, -4, 4);
    const auto bias = reference::random_f32(c.experts, 2, -0.3, 0.3);
    const auto d_weights = reference::random_f32(c.tokens * c.top_k, 3);
    // Of the size of the gradient that comes through the weights.
    const double alpha = 2.0 * static_cast<double>(c.tokens);
    reference::BalanceShape shape = balance_of(c, kind, alpha);
    if (!with_devices)
        shape.devices = 1, shape.device_alpha = shape.communication_alpha = 0;
    const ops::BalanceCounts counted{
        .of_scores = kind != BalanceLossKind::Expert,
        .devices = with_devices ? static_cast<std::uint32_t>(shape.devices) : 0,
        .tokens = global};
    const OpTensor logits_t = rig.tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor bias_t = rig.tensor(DType::F32, {c.experts}, bias);
    const OpTensor d_weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor counts = rig.result(DType::U32, {runs, counted.columns(c.experts)});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor without = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor plain = rig.result(DType::F32, {c.tokens, c.experts});
    const auto weight = [&](double factor, std::uint64_t parts, std::uint64_t of_token) {
        return static_cast<float>(factor * static_cast<double>(parts) /
                                  static_cast<double>(of_token * length * c.tokens));
    };
    ops::RouterBalance balance{counts, weight(alpha, c.experts, c.top_k)};
    balance.device_weight = weight(shape.device_alpha, shape.devices, c.top_k);
    balance.communication_weight =
        weight(shape.communication_alpha, shape.devices, shape.devices_per_token);
    balance.counted = counted;
    const int times = global ? 3 : 1; // as if two micro-batches of the kind had gone before
    rig.run([&](Recording& recording) {
        const auto options = options_of(c);
        ops::router_forward(recording, logits_t, c.bias ? bias_t.view : TensorView{}, scores, ids,
                            weights, options);
        recording.fill(counts.view.buffer, 0);
        if (counted.of_scores || with_devices)
            for (int i = 0; i < times; ++i)
                ops::balance_counts(recording, scores, ids, counts, counted);
        else
            ops::expert_counts(recording, ids, counts, true);
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options, balance);
        ops::router_dgrad(recording, d_weights_t, ids, scores, without, options, {counts, 0});
        ops::router_dgrad(recording, d_weights_t, ids, scores, plain, options);
    });
    check.exact("a weight of 0", rig.read(without), rig.read(plain));

    // With the choice as it was made, and with the scores as they are: what hangs on less than
    // their error may be counted otherwise.
    const reference::RouterShape router = shape_of(c);
    const auto chosen = rig.read<std::int32_t>(ids);
    const auto device_scores = to_double(rig.read(scores));
    auto expected_counts = reference::balance_counts(device_scores, chosen, router, shape, runs);
    for (int i = 1; i < times; ++i)
        for (reference::BalanceCounts& run : expected_counts)
            run = sum(run, reference::balance_counts(device_scores, chosen, router, shape, 1)[0]);
    check.exact("counts", rig.read<std::uint64_t>(counts), in_columns(expected_counts, counted));
    const auto expected_scores = reference::router_scores(to_double(logits), router);
    const auto loss = reference::balance_loss(expected_scores, expected_counts, router, shape,
                                              static_cast<std::size_t>(c.tokens));
    double largest = c.scale * (c.normalise ? 2 : 1);
    for (const double value : loss.dscores)
        largest = std::max(largest, std::abs(value));
    compare_gradients(check, c, rig.read(d_logits),
                      reference::router_input_grad(to_double(d_weights), loss.dscores,
                                                   expected_scores, chosen, router),
                      rig.read(plain), largest, c.top_k < c.experts);
}

void check_balance_losses(Check& check, const OpRig& rig, const RouterCase& c) {
    for (const BalanceLossKind kind :
         {BalanceLossKind::Sequence, BalanceLossKind::Expert, BalanceLossKind::Global}) {
        check_balance_loss(check, rig, c, kind, false);
        if (balance_of(c, kind, 1).devices > 1 && c.top_k < c.experts)
            check_balance_loss(check, rig, c, kind, true);
    }
}

/// The loss of the logits' size, alone and beside a balance loss.
void check_z_loss(Check& check, const OpRig& rig, const RouterCase& c) {
    check.begin_case(c.name);
    const auto logits = reference::random_f32(c.tokens * c.experts, 1, -4, 40); // exp overflows
    const auto d_weights = reference::random_f32(c.tokens * c.top_k, 3);
    const OpTensor logits_t = rig.tensor(DType::F32, {c.tokens, c.experts}, logits);
    const OpTensor d_weights_t = rig.tensor(DType::F32, {c.tokens, c.top_k}, d_weights);
    const OpTensor scores = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor ids = rig.result(DType::I32, {c.tokens, c.top_k});
    const OpTensor weights = rig.result(DType::F32, {c.tokens, c.top_k});
    const OpTensor d_logits = rig.result(DType::F32, {c.tokens, c.experts});
    const OpTensor plain = rig.result(DType::F32, {c.tokens, c.experts});
    const double weight = 0.05;
    rig.run([&](Recording& recording) {
        const auto options = options_of(c);
        ops::router_forward(recording, logits_t, {}, scores, ids, weights, options);
        ops::router_dgrad(recording, d_weights_t, ids, scores, d_logits, options, {},
                          {logits_t, static_cast<float>(weight)});
        ops::router_dgrad(recording, d_weights_t, ids, scores, plain, options);
    });
    const reference::RouterShape router = shape_of(c);
    const auto chosen = rig.read<std::int32_t>(ids);
    const auto z = reference::router_z_loss(to_double(logits), c.experts, 1, weight);
    auto expected = reference::router_input_grad(
        to_double(d_weights), {}, reference::router_scores(to_double(logits), router), chosen,
        router);
    reference::accumulate(expected, z.dlogits);
    const double largest = c.scale * (c.normalise ? 2 : 1) + 2 * weight * 44;
    compare_gradients(check, c, rig.read(d_logits), expected, rig.read(plain), largest, true);
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

/// What a capacity keeps: scores of few values, of all bits, or not a number; choices of nobody.
struct CapacityCase {
    const char* name;
    std::uint64_t tokens, experts, top_k, groups, capacity;
    std::uint32_t values = 0; ///< that scores have; 0: any
    std::uint64_t runs = 0;   ///< of tokens, every third of which is spared; 0: none
    Depth depth = Depth::Quick;
};

constexpr auto kCapacityCases = std::to_array<CapacityCase>({
    {"one slot", 1, 1, 1, 1, 1},
    {"one slot, no room", 1, 1, 1, 1, 0},
    {"no room", 40, 6, 2, 3, 0},
    {"room for all", 40, 6, 2, 3, 80},
    {"room for one", 40, 6, 2, 3, 1},
    {"by expert", 130, 64, 6, 64, 9},
    {"by device", 130, 64, 6, 8, 70},
    {"all equal", 500, 8, 4, 8, 170, 1},
    {"three values", 500, 8, 4, 2, 700, 3},
    {"spared, less than the room", 96, 16, 4, 4, 60, 0, 12},
    {"spared, more than the room", 96, 16, 4, 4, 10, 5, 12},
    {"spared tokens, all equal", 96, 16, 4, 16, 8, 1, 96},
    {"20,000 slots", 2500, 64, 8, 8, 1900},
    {"20,000 slots by expert, ties", 2500, 64, 8, 64, 200, 50, 0, Depth::Full},
});

void check_capacity(Check& check, const OpRig& rig, const CapacityCase& c) {
    check.begin_case(c.name);
    std::vector<float> scores = reference::random_f32(c.tokens * c.experts, 1);
    std::vector<std::int32_t> chosen(c.tokens * c.top_k);
    for (std::size_t i = 0; i < scores.size(); ++i) {
        if (c.values > 0)
            scores[i] = static_cast<float>(mix(i) % c.values) * (i % 2 == 0 ? 1 : -1);
        if (c.values == 0 && mix(i + 7) % 16 == 0)
            scores[i] = std::bit_cast<float>(static_cast<std::uint32_t>(mix(i)));
    }
    for (std::size_t slot = 0; slot < chosen.size(); ++slot) {
        const std::uint64_t any = mix(slot + 99);
        // The lower experts more often, some nobody.
        chosen[slot] = static_cast<std::int32_t>((any % c.experts) * (any >> 32) % c.experts);
        if (chosen.size() > 1 && any % 13 == 0)
            chosen[slot] = any % 2 == 0 ? -1 : static_cast<std::int32_t>(c.experts);
    }
    std::vector<std::uint32_t> spared(c.runs);
    for (std::size_t run = 0; run < spared.size(); ++run)
        spared[run] = run % 3 == 1 ? static_cast<std::uint32_t>(run) : 0;
    const OpTensor scores_t = rig.tensor(DType::F32, {c.tokens, c.experts}, scores);
    const OpTensor ids = rig.tensor(DType::I32, {c.tokens, c.top_k}, chosen);
    const OpTensor kept = rig.result(DType::I32, {c.tokens, c.top_k});
    OpTensor spared_t;
    if (c.runs > 0)
        spared_t = rig.tensor(DType::U32, {c.runs}, spared);
    rig.run([&](Recording& recording) {
        ops::router_capacity(recording, scores_t, ids, kept, static_cast<std::uint32_t>(c.groups),
                             c.capacity, c.runs > 0 ? spared_t.view : TensorView{});
    });
    check.exact("kept", rig.read<std::int32_t>(kept),
                reference::kept_choices(to_double(scores), chosen,
                                        {.experts = c.experts, .top_k = c.top_k}, c.groups,
                                        c.capacity, spared));
}

} // namespace

void add_router_checks(std::vector<OpCheck>& checks, Depth depth) {
    add_router_table(checks, depth, "router", check_router);
    add_router_table(checks, depth, "router balance losses", check_balance_losses);
    add_router_table(checks, depth, "router z loss", check_z_loss);
    checks.push_back({"ops", "router balance", check_balance});
    checks.push_back({"ops", "router capacity", [depth](Check& check, const OpRig& rig) {
                          for (const CapacityCase& c : kCapacityCases)
                              if (c.depth <= depth)
                                  check_capacity(check, rig, c);
                      }});
}

} // namespace bellows::checks
