// SPDX-License-Identifier: MIT
#include "parts.hpp"
#include "router_options.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/experts.hpp>
#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/groups.hpp>
#include <bellows/fp8/route.hpp>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

namespace bellows::cached {

namespace {

/// Most token rows whose experts' rows are found by ids.
constexpr std::uint64_t kRowsByIds = 256;
/// Words of Experts::own_rows_: a count and offsets that nobody reads, then the slots' rows.
constexpr std::uint64_t kOwnCount = 0, kOwnOffsets = 4, kOwnSlots = 8;

LinearRows linear_rows(const CachedExperts::Routed& routed) {
    LinearRows rows(routed.rows);
    rows.codes = routed.codes;
    return rows;
}

class Experts final : public CachedExperts {
public:
    Experts(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters);

    void record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                const TensorView& stream) const override;
    Routed route(Recording& r, Arena::Frame& kept, const StepRows& rows,
                 const TensorView& stream) const override;
    void shared(Recording& r, Arena::Frame& scratch, const Routed& routed,
                const TensorView& stream) const override;
    bool has_shared() const override { return c_.shared_experts > 0; }
    void received(Recording& r, Arena::Frame& scratch, const ExchangeHandle& handle,
                  std::uint64_t expected_rows, const TensorView& results) const override;

private:
    std::uint64_t most_few_rows() const;
    std::optional<fp8::ExpertWeights> all_experts() const;
    void record_few_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                         const TensorView& stream) const;
    LinearRows normalised_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                               const TensorView& stream) const;
    TensorView logits(Recording& r, Arena::Frame& scratch, const TensorView& norm) const;
    TensorView choice_bias() const; ///< without memory where the router has none
    Routed choose(Recording& r, Arena::Frame& scratch, const LinearRows& norm,
                  const TensorView& logits) const;
    TensorView shared_inner(Recording& r, Arena::Frame& scratch, const LinearRows& norm) const;
    void add_shared(Recording& r, Arena::Frame& scratch, const TensorView& gate_up,
                    const TensorView& stream) const;
    std::uint64_t rows_of_expert(const StepRows& rows) const;
    ops::MoeLayout own_rows(std::uint64_t tokens, std::uint64_t slots_of_each) const;
    fp8::GroupedRows rows_by_ids(const StepRows& rows, const TensorView& ids) const;
    bool takes_together(const Recording& r, Arena::Frame& scratch, const StepRows& rows,
                        const TensorView& stream) const;
    void record_together(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                         const TensorView& stream) const;
    fp8::Route route_together(const StepRows& rows, const TensorView& stream) const;
    bool routed_by_ids(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                       const Routed& routed, const TensorView& stream) const;
    void routed(Recording& r, Arena::Frame& scratch, const StepRows& rows, const Routed& routed,
                const TensorView& stream) const;
    ops::MoeLayout make_layout(Recording& r, Arena::Frame& scratch, std::uint64_t tokens) const;

    const ModelConfig c_;
    LayerParameters p_;
    ExpertLinear gate_up_, down_;
    Buffer own_rows_;                            ///< of own_rows(), words
    std::optional<fp8::ExpertWeights> together_; ///< if the device takes all experts at once
    /// Of all experts, as products of few rows read them.
    fp8::Operand gate_up_weights_, down_weights_;
    std::uint64_t few_rows_; ///< the most that go by few_rows.hpp
};

Experts::Experts(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters)
    : c_(config), p_(parameters, layer),
      gate_up_(parameters.experts(layer, "gate_up_proj"), parameters.products()),
      down_(parameters.experts(layer, "down_proj"), parameters.products()),
      gate_up_weights_(few_rows_operand(parameters.experts(layer, "gate_up_proj"))),
      down_weights_(few_rows_operand(parameters.experts(layer, "down_proj"))),
      few_rows_(most_few_rows()) {
    if (parameters.linear_precision() != LinearPrecision::Fp8)
        return;
    together_ = all_experts();
    const std::uint64_t slots_of_each = c_.top_k + (together_ ? together_->shared() : 0);
    std::vector<std::int32_t> words(kOwnSlots + kRowsByIds * slots_of_each);
    std::iota(words.begin() + kOwnSlots, words.end(), 0);
    own_rows_ = Buffer(
        parameters.device(),
        {.name = "rows of slots", .bytes = 4 * words.size(), .category = MemoryCategory::Weights});
    parameters.device().upload(own_rows_.view(), std::span<const std::int32_t>(words));
}

std::uint64_t Experts::most_few_rows() const {
    const Device& device = p_.store().device();
    const DType act = p_.store().activation();
    if (!fp8::takes_few_rows(few_rows_operand(p_.at("mlp.gate.weight")), act))
        return 0;
    const std::uint64_t shared =
        c_.shared_experts == 0
            ? fp8::kMostFewRows
            : p_.most_few_rows({"mlp.shared_experts.gate_up_proj", "mlp.shared_experts.down_proj"});
    return std::min({shared, fp8::few_rows_that_pay(device, gate_up_weights_, act),
                     fp8::few_rows_that_pay(device, down_weights_, act)});
}

/// Nothing where the device has no code for them.
std::optional<fp8::ExpertWeights> Experts::all_experts() const {
    if (!gate_up_weights_.quantized || !down_weights_.quantized)
        return std::nullopt;
    fp8::ExpertWeights weights{*gate_up_weights_.quantized, *down_weights_.quantized, {}, {}};
    if (has_shared()) {
        weights.shared_gate_up =
            few_rows_operand(p_.at("mlp.shared_experts.gate_up_proj.weight")).quantized;
        weights.shared_down =
            few_rows_operand(p_.at("mlp.shared_experts.down_proj.weight")).quantized;
    }
    if (!fp8::why_not_experts(p_.store().device(), weights, 0).empty())
        return std::nullopt;
    return weights;
}

/// Exact: codes are those of the values that are stored, as an exchange makes them.
LinearRows Experts::normalised_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                                    const TensorView& stream) const {
    const Parameter& gain = p_.at("post_attention_layernorm.weight");
    if (!rows.exact() || p_.store().linear_precision() != LinearPrecision::Fp8)
        return normalised(r, scratch, p_.store(), stream, gain, c_.norm_eps, /*with_values=*/true);
    LinearRows norm = normalised_values(r, scratch, stream, gain, c_.norm_eps);
    norm.codes = rows_in(scratch, rows.rows, c_.hidden);
    fp8::quantize(r, norm.values, *norm.codes);
    return norm;
}

TensorView Experts::choice_bias() const {
    return c_.router_bias ? p_.at("mlp.gate.e_score_correction_bias").weight : TensorView{};
}

/// Each expert's logit.
TensorView Experts::logits(Recording& r, Arena::Frame& scratch, const TensorView& norm) const {
    const TensorView logits = scratch.tensor(DType::F32, {norm.extent[0], c_.routed_experts});
    ops::gemm_nt(r, norm, p_.at("mlp.gate.weight").compute, logits);
    return logits;
}

CachedExperts::Routed Experts::choose(Recording& r, Arena::Frame& scratch, const LinearRows& norm,
                                      const TensorView& logits) const {
    const std::uint64_t rows = logits.extent[0];
    const TensorView scores = scratch.tensor(DType::F32, {rows, c_.routed_experts}),
                     ids = scratch.tensor(DType::I32, {rows, c_.top_k}),
                     weights = scratch.tensor(DType::F32, {rows, c_.top_k});
    ops::router_forward(r, logits, choice_bias(), scores, ids, weights, router_options(c_));
    return {norm.values, norm.codes, ids, weights};
}

/// Gate and up of the shared experts, nothing where there are none.
TensorView Experts::shared_inner(Recording& r, Arena::Frame& scratch,
                                 const LinearRows& norm) const {
    if (!has_shared())
        return {};
    const TensorView gate_up =
        scratch.tensor(p_.store().activation(), {norm.values.extent[0], 2 * c_.shared_ffn()});
    p_.linear("mlp.shared_experts.gate_up_proj").forward(r, scratch, norm, gate_up);
    return gate_up;
}

void Experts::add_shared(Recording& r, Arena::Frame& scratch, const TensorView& gate_up,
                         const TensorView& stream) const {
    if (gate_up.buffer)
        p_.linear("mlp.shared_experts.down_proj")
            .forward(r, scratch, swiglu(r, scratch, p_.store(), gate_up), stream, true);
}

CachedExperts::Routed Experts::route(Recording& r, Arena::Frame& kept, const StepRows& rows,
                                     const TensorView& stream) const {
    const LinearRows norm = normalised_rows(r, kept, rows, stream);
    return choose(r, kept, norm, logits(r, kept, norm.values));
}

void Experts::shared(Recording& r, Arena::Frame& scratch, const Routed& routed,
                     const TensorView& stream) const {
    add_shared(r, scratch, shared_inner(r, scratch, linear_rows(routed)), stream);
}

ops::MoeLayout Experts::make_layout(Recording& r, Arena::Frame& scratch,
                                    std::uint64_t tokens) const {
    // Where experts have few rows each, padding would be most of the rows.
    const std::uint32_t usual = fp8::m_alignment(r.device());
    const std::uint32_t alignment = tokens * c_.top_k >= c_.routed_experts * usual ? usual : 1;
    const std::uint64_t capacity =
        ops::moe_capacity(tokens, c_.top_k, c_.routed_experts, alignment);
    return {scratch.tensor(DType::U32, {c_.routed_experts}),
            scratch.tensor(DType::U32, {c_.routed_experts + 1}),
            scratch.tensor(DType::I32, {capacity}), scratch.tensor(DType::I32, {tokens, c_.top_k}),
            alignment};
}

std::uint64_t Experts::rows_of_expert(const StepRows& rows) const {
    return rows.expected_expert_rows > 0
               ? rows.expected_expert_rows
               : std::max<std::uint64_t>(rows.rows * c_.top_k / c_.routed_experts, 1);
}

/// Each slot has the row of its number: all rows are one group's.
ops::MoeLayout Experts::own_rows(std::uint64_t tokens, std::uint64_t slots_of_each) const {
    const std::uint64_t slots = tokens * slots_of_each;
    const auto at = [&](std::uint64_t word, DType dtype,
                        std::initializer_list<std::uint64_t> extents) {
        return TensorView::contiguous(own_rows_.view().sub(4 * word, own_rows_.size() - 4 * word),
                                      dtype, extents);
    };
    return {at(kOwnCount, DType::U32, {1}), at(kOwnOffsets, DType::U32, {2}),
            at(kOwnSlots, DType::I32, {slots}), at(kOwnSlots, DType::I32, {tokens, slots_of_each})};
}

fp8::GroupedRows Experts::rows_by_ids(const StepRows& rows, const TensorView& ids) const {
    fp8::GroupedRows by_ids = fp8::unlisted_rows(fp8::GroupLayout::by_ids(ids, c_.routed_experts));
    by_ids.layout.expected_rows = rows_of_expert(rows);
    return by_ids;
}

/// Few rows: products find them by the router's ids, and each slot of a token has a row. False: the
/// products take them in another way, and nothing is recorded.
bool Experts::routed_by_ids(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                            const Routed& routed, const TensorView& stream) const {
    const LinearRows norm = linear_rows(routed);
    const TensorView ids = routed.ids.with_row_count(rows.count);
    if (!norm.codes || rows.rows > kRowsByIds)
        return false;
    const std::uint64_t slots = rows.rows * c_.top_k;
    Arena::Frame part = scratch.nested();
    const fp8::GroupedRows of_tokens = rows_by_ids(rows, ids);
    fp8::GroupedRows of_slots = of_tokens;
    of_slots.slots_per_a_row = 1;
    const TensorView gate_up = part.tensor(stream.dtype, {slots, 2 * c_.moe_ffn}),
                     results = part.tensor(stream.dtype, {slots, c_.hidden});
    const fp8::Quantized hidden = rows_in(part, slots, c_.moe_ffn);
    const auto variant = gate_up_.streams(r, *norm.codes, gate_up, of_tokens);
    if (!variant || !down_.streams(r, hidden, results, of_slots))
        return false;
    if (together_ && variant == fp8::Variant::Native &&
        fp8::why_not_experts(r.device(), *together_, slots).empty()) {
        // The same bits in fewer dispatches.
        fp8::experts_hidden(r, *norm.codes, *together_, ids, hidden, stream.dtype == DType::BF16);
        fp8::experts_results(r, hidden, *together_, ids, results);
    } else {
        gate_up_.forward(r, part, norm, gate_up, of_tokens);
        fp8::swiglu(r, gate_up, {}, hidden);
        down_.forward(r, part, hidden, results, of_slots);
    }
    ops::moe_unpermute(r, results, own_rows(rows.rows, c_.top_k), routed.weights, stream, true,
                       rows.exact() ? ids : TensorView{});
    scratch.cover(part);
    return true;
}

fp8::Route Experts::route_together(const StepRows& rows, const TensorView& stream) const {
    return {.x = stream.with_row_count(rows.count),
            .gain = p_.at("post_attention_layernorm.weight").weight,
            .eps = static_cast<float>(c_.norm_eps),
            .gate = p_.at("mlp.gate.weight").compute,
            .bias = choice_bias(),
            .options = router_options(c_),
            .shared = together_->shared()};
}

/// Whether record_together() serves: it has other bits than products of many rows.
bool Experts::takes_together(const Recording& r, Arena::Frame& scratch, const StepRows& rows,
                             const TensorView& stream) const {
    if (!together_ || rows.exact() || rows.rows > kRowsByIds)
        return false;
    const std::uint64_t all_slots = rows.rows * (c_.top_k + together_->shared());
    if (!fp8::why_not_experts(r.device(), *together_, all_slots).empty() ||
        !fp8::why_not_route(r.device(), route_together(rows, stream), c_.top_k).empty())
        return false;
    Arena::Frame part = scratch.nested();
    const TensorView ids = part.tensor(DType::I32, {rows.rows, c_.top_k}),
                     gate_up = part.tensor(stream.dtype, {rows.rows * c_.top_k, 2 * c_.moe_ffn});
    return gate_up_.streams(r, rows_in(part, rows.rows, c_.hidden), gate_up,
                            rows_by_ids(rows, ids)) == fp8::Variant::Native;
}

/// Shared experts are experts that every row chooses.
void Experts::record_together(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                              const TensorView& stream) const {
    const std::uint32_t shared = together_->shared();
    const std::uint64_t slots = rows.rows * (c_.top_k + shared);
    const std::uint64_t columns = c_.top_k + shared;
    const fp8::Quantized norm = rows_in(scratch, rows.rows, c_.hidden),
                         hidden = rows_in(scratch, slots, c_.moe_ffn);
    const TensorView chosen = scratch.tensor(DType::I32, {rows.rows, columns}),
                     weights = scratch.tensor(DType::F32, {rows.rows, columns}),
                     results = scratch.tensor(stream.dtype, {slots, c_.hidden}),
                     ids = chosen.with_row_count(rows.count);
    fp8::route(r, route_together(rows, stream), norm, chosen, weights);
    fp8::experts_hidden(r, norm, *together_, ids, hidden, stream.dtype == DType::BF16);
    fp8::experts_results(r, hidden, *together_, ids, results);
    ops::moe_unpermute(r, results, own_rows(rows.rows, columns), weights, stream, true);
}

void Experts::routed(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                     const Routed& routed, const TensorView& stream) const {
    if (routed_by_ids(r, scratch, rows, routed, stream))
        return;
    const LinearRows norm = linear_rows(routed);
    const TensorView ids = routed.ids.with_row_count(rows.count);
    const ops::MoeLayout layout = make_layout(r, scratch, rows.rows);
    const std::uint64_t capacity = layout.row_to_slot.extent[0];
    const fp8::GroupLayout sums = fp8::GroupLayout::prefix_sums(layout.offsets, capacity);
    fp8::GroupedRows grouped = fp8::make_grouped_rows(
        r, ids, layout,
        scratch.bytes(ops::moe_layout_workspace_bytes(rows.rows, c_.top_k, c_.routed_experts)),
        {2 * c_.moe_ffn, c_.hidden, 0, 0},
        scratch.bytes(fp8::grouped_rows_bytes(r.device(), sums)));
    grouped.layout.expected_rows = rows_of_expert(rows);
    LinearRows tokens = norm;
    if (norm.codes) {
        tokens.slots = {layout.row_to_slot, static_cast<std::uint32_t>(c_.top_k)};
    } else {
        tokens = scratch.tensor(stream.dtype, {capacity, c_.hidden});
        ops::moe_gather(r, norm.values, layout, {}, tokens.values);
    }
    const TensorView gate_up = scratch.tensor(stream.dtype, {capacity, 2 * c_.moe_ffn}),
                     results = scratch.tensor(stream.dtype, {capacity, c_.hidden});
    gate_up_.forward(r, scratch, tokens, gate_up, grouped);
    const LinearRows hidden =
        swiglu(r, scratch, p_.store(), gate_up.with_row_count(layout.row_count()));
    down_.forward(r, scratch, hidden, results, grouped);
    ops::moe_unpermute(r, results, layout, routed.weights, stream, true,
                       rows.exact() ? ids : TensorView{});
}

void Experts::received(Recording& r, Arena::Frame& scratch, const ExchangeHandle& handle,
                       std::uint64_t expected_rows, const TensorView& results) const {
    fp8::GroupLayout masked = fp8::GroupLayout::masked(handle.expert_counts(), handle.spacing());
    masked.expected_rows = expected_rows;
    const fp8::GroupedRows rows =
        fp8::make_grouped_rows(r, masked, {2 * c_.moe_ffn, c_.hidden, 0, 0},
                               scratch.bytes(fp8::grouped_rows_bytes(r.device(), masked)));
    const bool codes = p_.store().linear_precision() == LinearPrecision::Fp8;
    const LinearRows tokens =
        codes ? LinearRows(handle.quantized_rows()) : LinearRows(handle.rows());
    const TensorView gate_up = scratch.tensor(results.dtype, {handle.capacity(), 2 * c_.moe_ffn});
    gate_up_.forward(r, scratch, tokens, gate_up, rows);
    // Most rows are room for tokens that have not come.
    const TensorView received =
        gate_up.with_row_counts(handle.expert_counts().buffer, handle.spacing());
    down_.forward(r, scratch, swiglu(r, scratch, p_.store(), received), results, rows);
}

void Experts::record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                     const TensorView& stream) const {
    if (has_few_rows(rows, few_rows_)) {
        record_few_rows(r, scratch, rows, stream);
        return;
    }
    if (takes_together(r, scratch, rows, stream)) {
        record_together(r, scratch, rows, stream);
        return;
    }
    const LinearRows norm = normalised_rows(r, scratch, rows, stream);
    // Shared and routed experts take turns: a device does side by side what stands together and
    // needs nothing new.
    const TensorView logits = this->logits(r, scratch, norm.values),
                     gate_up = shared_inner(r, scratch, norm);
    const Routed to_experts = choose(r, scratch, norm, logits);
    add_shared(r, scratch, gate_up, stream);
    routed(r, scratch, rows, to_experts, stream);
}

/// The experts' first product makes the choice itself where that pays; that of the shared experts
/// runs beside it, or beside the choice, and their second is part of the sum of them all.
void Experts::record_few_rows(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                              const TensorView& stream) const {
    using Result = fp8::FewRowsForm::Result;
    const Parameter& gain = p_.at("post_attention_layernorm.weight");
    const TensorView logits = scratch.tensor(DType::F32, {rows.rows, c_.routed_experts});
    p_.few_rows(r, "mlp.gate", stream, logits, behind_norm(gain, c_.norm_eps));
    const bool choose_there = fp8::few_rows_choose(r.device(), c_.routed_experts, c_.top_k);
    Routed routed;
    if (choose_there) {
        routed.ids = scratch.tensor(DType::I32, {rows.rows, c_.top_k});
        routed.weights = scratch.tensor(DType::F32, {rows.rows, c_.top_k});
    } else {
        routed = choose(r, scratch, {}, logits);
    }
    const TensorView ids = routed.ids.with_row_count(rows.count);
    const fp8::FewRowsForm swiglu = behind_norm(gain, c_.norm_eps, Result::Swiglu);
    fp8::FewRowsExperts sum{.hidden =
                                scratch.tensor(stream.dtype, {rows.rows * c_.top_k, c_.moe_ffn}),
                            .weights = down_weights_,
                            .ids = ids,
                            .choice_weights = routed.weights};
    if (c_.shared_experts > 0) {
        sum.shared = scratch.tensor(stream.dtype, {rows.rows, c_.shared_ffn()});
        sum.shared_weights = few_rows_operand(p_.at("mlp.shared_experts.down_proj.weight"));
    }
    const auto shared = [&] {
        if (c_.shared_experts > 0)
            p_.few_rows(r, "mlp.shared_experts.gate_up_proj", stream, sum.shared, swiglu);
    };
    if (choose_there) {
        fp8::few_rows_routed(r, stream, gate_up_weights_,
                             {.logits = logits,
                              .bias = choice_bias(),
                              .options = router_options(c_),
                              .ids = ids,
                              .weights = routed.weights},
                             sum.hidden, swiglu);
        shared();
    } else {
        shared();
        fp8::few_rows_by_ids(r, stream, gate_up_weights_, ids, sum.hidden, swiglu);
    }
    fp8::few_rows_experts(r, sum, stream);
}

} // namespace

std::unique_ptr<CachedExperts> experts(const ModelConfig& config, std::uint64_t layer,
                                       ParameterStore& parameters) {
    return std::make_unique<Experts>(config, layer, parameters);
}

} // namespace bellows::cached
