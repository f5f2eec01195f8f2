// SPDX-License-Identifier: MIT
#include "parts.hpp"
#include "router_options.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/groups.hpp>

#include <algorithm>

namespace bellows::cached {

namespace {

class Experts final : public CachedLayer {
public:
    Experts(const ModelConfig& config, std::uint64_t layer, ParameterStore& parameters)
        : c_(config), p_(parameters, layer),
          gate_up_(parameters.experts(layer, "gate_up_proj"), parameters.products()),
          down_(parameters.experts(layer, "down_proj"), parameters.products()) {}

    void record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                const TensorView& stream) const override;

private:
    /// Which experts a token goes to, and with what weights.
    struct Routing {
        TensorView ids, weights; ///< [rows, top_k] i32 and f32
    };

    Routing route(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                  const TensorView& norm) const;
    void shared(Recording& r, Arena::Frame& scratch, const LinearRows& norm,
                const TensorView& stream) const;
    void routed(Recording& r, Arena::Frame& scratch, const StepRows& rows, const LinearRows& norm,
                const Routing& routing, const TensorView& stream) const;
    ops::MoeLayout make_layout(Recording& r, Arena::Frame& scratch, std::uint64_t tokens) const;

    const ModelConfig c_;
    LayerParameters p_;
    ExpertLinear gate_up_, down_;
};

Experts::Routing Experts::route(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                                const TensorView& norm) const {
    const std::uint64_t experts = c_.routed_experts;
    const TensorView logits = scratch.tensor(DType::F32, {rows.rows, experts}),
                     scores = scratch.tensor(DType::F32, {rows.rows, experts}),
                     ids = scratch.tensor(DType::I32, {rows.rows, c_.top_k}),
                     weights = scratch.tensor(DType::F32, {rows.rows, c_.top_k});
    ops::gemm_nt(r, norm, p_.at("mlp.gate.weight").compute, logits);
    const TensorView bias =
        c_.router_bias ? p_.at("mlp.gate.e_score_correction_bias").weight : TensorView{};
    ops::router_forward(r, logits, bias, scores, ids, weights, router_options(c_));
    return {ids.with_row_count(rows.count), weights};
}

void Experts::shared(Recording& r, Arena::Frame& scratch, const LinearRows& norm,
                     const TensorView& stream) const {
    if (c_.shared_experts == 0)
        return;
    const TensorView gate_up =
        scratch.tensor(stream.dtype, {stream.extent[0], 2 * c_.shared_ffn()});
    p_.linear("mlp.shared_experts.gate_up_proj").forward(r, scratch, norm, gate_up);
    p_.linear("mlp.shared_experts.down_proj")
        .forward(r, scratch, swiglu(r, scratch, p_.store(), gate_up), stream, true);
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

void Experts::routed(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                     const LinearRows& norm, const Routing& routing,
                     const TensorView& stream) const {
    const ops::MoeLayout layout = make_layout(r, scratch, rows.rows);
    const std::uint64_t capacity = layout.row_to_slot.extent[0];
    const fp8::GroupLayout sums = fp8::GroupLayout::prefix_sums(layout.offsets, capacity);
    fp8::GroupedRows grouped = fp8::make_grouped_rows(
        r, routing.ids, layout,
        scratch.bytes(ops::moe_layout_workspace_bytes(rows.rows, c_.top_k, c_.routed_experts)),
        {2 * c_.moe_ffn, c_.hidden, 0, 0},
        scratch.bytes(fp8::grouped_rows_bytes(r.device(), sums)));
    grouped.layout.expected_rows =
        rows.expected_expert_rows > 0
            ? rows.expected_expert_rows
            : std::max<std::uint64_t>(rows.rows * c_.top_k / c_.routed_experts, 1);
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
    ops::moe_unpermute(r, results, layout, routing.weights, stream, true);
}

void Experts::record(Recording& r, Arena::Frame& scratch, const StepRows& rows,
                     const TensorView& stream) const {
    const LinearRows norm =
        normalised(r, scratch, p_.store(), stream, p_.at("post_attention_layernorm.weight"),
                   c_.norm_eps, /*with_values=*/true);
    const Routing routing = route(r, scratch, rows, norm.values);
    shared(r, scratch, norm, stream);
    routed(r, scratch, rows, norm, routing, stream);
}

} // namespace

std::unique_ptr<CachedLayer> experts(const ModelConfig& config, std::uint64_t layer,
                                     ParameterStore& parameters) {
    return std::make_unique<Experts>(config, layer, parameters);
}

} // namespace bellows::cached
