// SPDX-License-Identifier: MIT
#include "moe_layer/layer.hpp"

#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/quantize.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace bellows::bench {

namespace {

constexpr fp8::Recipe kRows{};

fp8::Quantized quantised_rows(OpData& data, std::uint64_t rows, std::uint64_t columns) {
    return fp8::make_quantized(data.bytes(fp8::quantized_bytes(kRows, {rows, columns})), kRows,
                               {rows, columns});
}

} // namespace

std::string name_of(const MoeLayerShape& s) {
    return std::to_string(s.tokens) + "x" + std::to_string(s.hidden) + "x" +
           std::to_string(s.experts) + "x" + std::to_string(s.ffn) + "x" + std::to_string(s.top_k);
}

MoeLayerRouting::MoeLayerRouting(const MoeLayerCase& c) {
    const MoeLayerShape& s = c.shape;
    reference::Random random(5);
    std::vector<std::pair<double, std::int32_t>> scores(s.experts);
    for (std::uint64_t t = 0; t < s.tokens; ++t) {
        // The largest of logits with Gumbel noise: a draw without repetition.
        for (std::uint64_t e = 0; e < s.experts; ++e)
            scores[e] = {-c.skew * std::log1p(static_cast<double>(e)) -
                             std::log(-std::log(random.uniform(1e-12, 1))),
                         static_cast<std::int32_t>(e)};
        std::partial_sort(scores.begin(), scores.begin() + static_cast<std::ptrdiff_t>(s.top_k),
                          scores.end(), std::greater<>());
        std::vector<double> drawn(s.top_k);
        double sum = 0;
        for (double& weight : drawn)
            sum += weight = random.uniform(0.25, 1);
        for (std::uint64_t k = 0; k < s.top_k; ++k) {
            ids.push_back(scores[k].second);
            weights.push_back(static_cast<float>(drawn[k] / sum));
        }
    }
}

MoeLayer::MoeLayer(Device& device, const MoeLayerCase& c, const fp8::Choice& choice)
    : case_(c), choice_(choice), routing_(c), data_(device) {
    make_tensors();
    make_weights();
    Recording first(device, QueueRole::Compute, "place");
    place(first);
    device.submit(first).wait();
    if (case_.fp8)
        gate_up_ = product(*t_.q, t_.gate_up_weights, t_.gate_up, rows_by_slots());
    else
        gate_up_ = product(t_.rows, t_.gate_up_weights, t_.gate_up, rows_);
    down_ = product(t_.hidden, t_.down_weights, t_.results, rows_);
    make_parts();
    Recording all(device, QueueRole::Compute, "layer");
    record(all);
    device.submit(all).wait();
    wrong_ = check();
}

void MoeLayer::make_tensors() {
    const MoeLayerShape& s = case_.shape;
    Device& device = data_.device();
    // Gates get values around 1, where SwiGLU is not yet linear.
    const auto largest = static_cast<float>(3 / std::sqrt(static_cast<double>(s.hidden)));
    t_.x = data_.random(DType::BF16, {s.tokens, s.hidden}, -largest, largest);
    t_.y = data_.empty(DType::BF16, {s.tokens, s.hidden});
    t_.ids = data_.empty(DType::I32, {s.tokens, s.top_k});
    t_.weights = data_.values({s.tokens, s.top_k}, routing_.weights);
    device.upload(t_.ids.buffer.sub(0, 4 * s.slots()), std::span(routing_.ids));

    const std::uint32_t alignment = fp8::m_alignment(device);
    capacity_ = ops::moe_capacity(s.tokens, s.top_k, s.experts, alignment);
    t_.layout = {data_.empty(DType::U32, {s.experts}), data_.empty(DType::U32, {s.experts + 1}),
                 data_.empty(DType::I32, {capacity_}), data_.empty(DType::I32, {s.tokens, s.top_k}),
                 alignment};
    place_workspace_ = data_.bytes(ops::moe_layout_workspace_bytes(s.tokens, s.top_k, s.experts));
    list_ = data_.bytes(fp8::grouped_rows_bytes(
        device, fp8::GroupLayout::prefix_sums(t_.layout.offsets, capacity_)));
    if (case_.fp8) {
        t_.q = quantised_rows(data_, s.tokens, s.hidden);
        t_.hidden = quantised_rows(data_, capacity_, s.ffn);
    } else {
        t_.rows = data_.empty(DType::BF16, {capacity_, s.hidden});
        t_.hidden = data_.empty(DType::BF16, {capacity_, s.ffn});
    }
    t_.gate_up = data_.empty(DType::BF16, {capacity_, 2 * s.ffn});
    t_.results = data_.empty(DType::BF16, {capacity_, s.hidden});
}

void MoeLayer::make_weights() {
    const MoeLayerShape& s = case_.shape;
    OperandStorage storage;
    storage.fp8 = case_.fp8;
    t_.gate_up_weights =
        random_operand(data_, storage, fp8::Blocks::Blocks128, {s.experts, 2 * s.ffn, s.hidden}, 3);
    t_.down_weights =
        random_operand(data_, storage, fp8::Blocks::Blocks128, {s.experts, s.hidden, s.ffn}, 4);
}

void MoeLayer::place(Recording& r) {
    const MoeLayerShape& s = case_.shape;
    rows_ = fp8::make_grouped_rows(r, t_.ids, t_.layout, place_workspace_,
                                   {2 * s.ffn, s.hidden, 0, 0}, list_);
}

fp8::GroupedRows MoeLayer::rows_by_slots() const {
    fp8::GroupedRows rows = rows_;
    rows.slots_per_a_row = static_cast<std::uint32_t>(case_.shape.top_k);
    return rows;
}

/// Weights that the product reads packed are packed, once.
MoeLayer::Product MoeLayer::product(const fp8::Operand& a, fp8::Operand& weights,
                                    const TensorView& d, const fp8::GroupedRows& rows) {
    Device& device = data_.device();
    const fp8::Way way = choice_.way(device, GemmForm::NT, a, weights, d, &rows);
    if (way.variant == fp8::Variant::Packed)
        weights = prepacked(data_, {.prepacked = true}, weights, GemmForm::NT, way.variant);
    return {way, data_.bytes(fp8::gemm_workspace_bytes(device, a, weights, rows, way.variant))};
}

/// As a model's linear layer of experts chooses.
void MoeLayer::record_product(Recording& r, const Product& product, const fp8::Operand& a,
                              const fp8::Operand& weights, const TensorView& d,
                              const fp8::GroupedRows& rows) const {
    if (case_.fp8 || product.way.variant == fp8::Variant::Direct)
        fp8::m_grouped_gemm_nt_contiguous(r, a, weights, d, rows, false, product.workspace,
                                          product.way);
    else
        ops::grouped_gemm_nt(r, a.values, weights.values, d, rows.tiles);
}

void MoeLayer::make_parts() {
    const MoeLayerShape& s = case_.shape;
    const std::uint64_t slots = s.slots();
    const auto product_flops = [&](std::uint64_t n, std::uint64_t k) {
        return 2 * static_cast<double>(slots) * static_cast<double>(n) * static_cast<double>(k);
    };
    const double results = operand_bytes(t_.results, 1, slots),
                 gate_up = operand_bytes(t_.gate_up, 1, slots),
                 hidden = operand_bytes(t_.hidden, 1, slots);
    const fp8::Operand tokens = case_.fp8 ? fp8::Operand(*t_.q) : fp8::Operand(t_.x);
    parts_.push_back({"place", [this](Recording& r) { place(r); },
                      bytes_of({t_.ids, t_.layout.counts, t_.layout.offsets, t_.layout.row_to_slot,
                                t_.layout.slot_to_row})});
    if (case_.fp8)
        parts_.push_back({"quantise", [this](Recording& r) { fp8::quantize(r, t_.x, *t_.q); },
                          bytes_of({t_.x}) + operand_bytes(tokens, 1, s.tokens)});
    else
        parts_.push_back(
            {"gather", [this](Recording& r) { ops::moe_gather(r, t_.x, t_.layout, {}, t_.rows); },
             bytes_of({t_.x}) + operand_bytes(t_.rows, 1, slots)});
    parts_.push_back({"gate_up",
                      [this, tokens](Recording& r) {
                          if (case_.fp8)
                              record_product(r, gate_up_, tokens, t_.gate_up_weights, t_.gate_up,
                                             rows_by_slots());
                          else
                              record_product(r, gate_up_, t_.rows, t_.gate_up_weights, t_.gate_up,
                                             rows_);
                      },
                      operand_bytes(tokens, 1, s.tokens) +
                          operand_bytes(t_.gate_up_weights, s.experts, 2 * s.ffn) + gate_up,
                      product_flops(2 * s.ffn, s.hidden)});
    parts_.push_back({"swiglu",
                      [this](Recording& r) {
                          const TensorView in = t_.gate_up.with_row_count(t_.layout.row_count());
                          if (case_.fp8)
                              fp8::swiglu(r, in, {}, *t_.hidden.quantized);
                          else
                              ops::swiglu_forward(r, in, {}, t_.hidden.values);
                      },
                      gate_up + hidden});
    parts_.push_back({"down",
                      [this](Recording& r) {
                          record_product(r, down_, t_.hidden, t_.down_weights, t_.results, rows_);
                      },
                      hidden + operand_bytes(t_.down_weights, s.experts, s.hidden) + results,
                      product_flops(s.hidden, s.ffn)});
    parts_.push_back({"combine",
                      [this](Recording& r) {
                          ops::moe_unpermute(r, t_.results, t_.layout, t_.weights, t_.y, false);
                      },
                      results + bytes_of({t_.weights, t_.y})});
}

std::string MoeLayer::variants() const {
    const auto name = [&](const Product& product) {
        return case_.fp8 || product.way.variant == fp8::Variant::Direct
                   ? std::string(fp8::to_string(product.way.variant))
                   : "engine's";
    };
    return "gate_up " + name(gate_up_) + ", down " + name(down_);
}

void MoeLayer::record(Recording& recording) const {
    for (const Part& part : parts_) {
        recording.label(part.name);
        part.record(recording);
    }
}

std::string MoeLayer::check() const {
    return check_moe_layer(data_.device(), case_, routing_, t_);
}

Workload MoeLayer::workload() const {
    const MoeLayerShape& s = case_.shape;
    double flops = 0;
    for (const Part& part : parts_)
        flops += part.flops;
    return {[this](Recording& recording) { record(recording); }, [this] { return wrong_; },
            bytes_of({t_.x, t_.ids, t_.weights, t_.y}) +
                operand_bytes(t_.gate_up_weights, s.experts, 2 * s.ffn) +
                operand_bytes(t_.down_weights, s.experts, s.hidden),
            flops};
}

Workload MoeLayer::workload(const Part& part) const {
    return {part.record, [this] { return wrong_; }, part.bytes, part.flops};
}

} // namespace bellows::bench
