// SPDX-License-Identifier: MIT
#include "linear.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/ops.hpp>
#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/quantize.hpp>

namespace bellows {

namespace {

/// Columns of D of which Variant::Native takes whole groups.
constexpr std::uint64_t kNativeColumns = 8;

/// In blocks along the features, for forward products and input gradients.
fp8::Quantized along_features(Recording& r, Arena::Frame& scratch, const LinearRows& x) {
    if (x.codes)
        return *x.codes;
    const std::uint64_t rows = x.values.extent[0], columns = x.values.extent[1];
    const fp8::Quantized q = rows_in(scratch, rows, columns);
    fp8::quantize(r, x.values, q);
    return q;
}

/// In blocks along the rows, for weight gradients: values, where products decode codes anyway, and
/// transposed codes, where the device's own code takes them. in: features of the layer's input.
/// groups: of experts' rows.
fp8::Operand along_rows(Recording& r, Arena::Frame& scratch, const LinearRows& x,
                        const fp8::Choice& products, std::uint64_t in,
                        const fp8::GroupedRows* groups = nullptr) {
    if (x.columns)
        return *x.columns;
    const TensorView& shape = x.codes ? x.codes->codes : x.values;
    const std::uint64_t rows = x.slots ? x.slots->slots.extent[0] : shape.extent[0];
    const std::uint64_t columns = shape.extent[1];
    const TensorView offsets = groups != nullptr ? groups->layout.values : TensorView{};
    const auto quantise = [&](const auto& to) {
        if (x.values.buffer)
            fp8::quantize(r, x.values, to);
        else if (x.slots)
            fp8::requantize(r, *x.codes, *x.slots, to);
        else
            fp8::requantize(r, *x.codes, to);
    };
    const fp8::Variant variant = products.at(fp8::weight_gradient_kind(rows, groups));
    const std::uint64_t group_count = groups != nullptr ? groups->layout.groups : 0;
    if (variant == fp8::Variant::Native && in % kNativeColumns == 0) {
        const fp8::Transposed transposed = fp8::make_transposed(
            scratch.bytes(fp8::transposed_bytes(kColumnsRecipe, {rows, columns}, group_count)),
            kColumnsRecipe, {rows, columns}, offsets);
        quantise(transposed);
        return transposed;
    }
    if (variant == fp8::Variant::Decoded) {
        const fp8::Decoded decoded =
            fp8::make_decoded(scratch.bytes(fp8::decoded_bytes({rows, columns})), kColumnsRecipe,
                              {rows, columns}, offsets);
        quantise(decoded);
        return decoded.values;
    }
    const fp8::Quantized q = fp8::make_quantized(
        scratch.bytes(fp8::quantized_bytes(kColumnsRecipe, {rows, columns}, group_count)),
        kColumnsRecipe, {rows, columns}, offsets);
    quantise(q);
    return q;
}

/// How a product is computed, and the memory that it takes so.
struct Means {
    fp8::Way way;
    BufferView workspace;
};

Means means_of(Recording& r, Arena::Frame& scratch, const fp8::Choice& products, GemmForm form,
               const fp8::Operand& a, const fp8::Operand& b, const TensorView& d,
               const fp8::GroupedRows* rows = nullptr) {
    const fp8::Way way = products.way(r.device(), form, a, b, d, rows);
    const std::uint64_t bytes =
        rows == nullptr ? fp8::gemm_workspace_bytes(r.device(), a, b, way.variant)
                        : fp8::gemm_workspace_bytes(r.device(), a, b, *rows, way.variant);
    return {way, scratch.bytes(bytes)};
}

/// What is quantised of a matrix or of experts' matrices, as products of this form read it.
fp8::Operand weights_for(const Parameter& weight, GemmForm form) {
    fp8::Operand operand(*weight.quantized);
    operand.prepacked = form == GemmForm::NT ? weight.packed_nt : weight.packed_nn;
    return operand;
}

/// The means of a product, and the weights that it reads. Weights with f32 scales that would be
/// decoded to f32 are rounded to bf16 where the device has matrix units for it.
struct WeightMeans : Means {
    fp8::Operand weights;
};

WeightMeans means_by_weight(Recording& r, Arena::Frame& scratch, const fp8::Choice& products,
                            GemmForm form, const fp8::Operand& a, const Parameter& weight,
                            const TensorView& d, const fp8::GroupedRows* rows = nullptr) {
    fp8::Operand b = weights_for(weight, form);
    if (b.quantized->recipe.rule == fp8::ScaleRule::F32 &&
        gemm_class(r.device()).units != GemmClass::Units::None &&
        products.way(r.device(), form, a, b, d, rows).variant == fp8::Variant::Decoded) {
        TensorView values = b.values;
        const std::uint64_t out = values.extent[values.rank - 2],
                            in = values.extent[values.rank - 1],
                            experts = values.rank == 3 ? values.extent[0] : 1;
        const BufferView memory = scratch.bytes(experts * out * in * size_of(DType::BF16));
        values = values.rank == 3 ? TensorView::contiguous(memory, DType::BF16, {experts, out, in})
                                  : TensorView::contiguous(memory, DType::BF16, {out, in});
        fp8::dequantize(r, *b.quantized, values);
        b = values;
    }
    return {means_of(r, scratch, products, form, a, b, d, rows), b};
}

/// d = x by `weight` (+ d), nt or nn.
void dense_product(Recording& r, Arena::Frame& scratch, const fp8::Choice& products, GemmForm form,
                   const LinearRows& x, const Parameter& weight, const TensorView& d,
                   bool accumulate) {
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_features(r, work, x);
    const auto product = form == GemmForm::NT ? fp8::gemm_nt : fp8::gemm_nn;
    const WeightMeans means = means_by_weight(r, work, products, form, a, weight, d);
    product(r, a, means.weights, d, accumulate, means.workspace, means.way);
    scratch.cover(work);
}

/// d = x * transpose(weight) (+ d) of bf16 tensors, if the table says Direct. False: nothing is
/// recorded, or there is no such weight. rows: of experts.
bool direct_product(Recording& r, const fp8::Choice& products, const TensorView& x,
                    const TensorView& weight, const TensorView& d, bool accumulate,
                    const fp8::GroupedRows* rows = nullptr) {
    if (!weight.buffer)
        return false;
    const fp8::Way way = products.way(r.device(), GemmForm::NT, x, weight, d, rows);
    if (way.variant != fp8::Variant::Direct)
        return false;
    if (rows == nullptr)
        fp8::gemm_nt(r, x, weight, d, accumulate, {}, way);
    else
        fp8::m_grouped_gemm_nt_contiguous(r, x, weight, d, *rows, accumulate, {}, way);
    return true;
}

/// d = x by the weights of each row's expert, nt or nn.
void expert_product(Recording& r, Arena::Frame& scratch, const fp8::Choice& products, GemmForm form,
                    const LinearRows& x, const Parameter& weights, const TensorView& d,
                    const fp8::GroupedRows& rows) {
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_features(r, work, x);
    const auto product = form == GemmForm::NT ? fp8::m_grouped_gemm_nt_contiguous
                                              : fp8::m_grouped_gemm_nn_contiguous;
    fp8::GroupedRows of = rows;
    if (x.slots) {
        of.slots = x.slots->slots;
        of.slots_per_a_row = x.slots->slots_per_a_row;
    }
    const WeightMeans means = means_by_weight(r, work, products, form, a, weights, d, &of);
    product(r, a, means.weights, d, of, false, means.workspace, means.way);
    scratch.cover(work);
}

} // namespace

fp8::Quantized rows_in(Arena::Frame& scratch, std::uint64_t rows, std::uint64_t columns) {
    return fp8::make_quantized(scratch.bytes(fp8::quantized_bytes(kRowsRecipe, {rows, columns})),
                               kRowsRecipe, {rows, columns});
}

LinearRows quantise_gradient(Recording& r, Arena::Frame& scratch, const TensorView& values,
                             const fp8::Quantized& columns) {
    LinearRows gradient;
    gradient.codes = rows_in(scratch, values.extent[0], values.extent[1]);
    gradient.columns = columns;
    fp8::quantize_rows_and_columns(r, values, *gradient.codes, columns);
    return gradient;
}

LinearRows with_columns(Recording& r, Arena::Frame& scratch, LinearRows x,
                        const fp8::Choice& products) {
    if (x.codes)
        x.columns = along_rows(r, scratch, x, products, x.codes->codes.extent[1]);
    return x;
}

void normalise(Recording& r, const TensorView& x, const TensorView& gain, const LinearRows& y,
               const TensorView& inv_rms, float eps) {
    if (y.codes)
        fp8::rmsnorm(r, x, gain, *y.codes, inv_rms, eps, y.values);
    else
        ops::rmsnorm_forward(r, x, gain, y.values, inv_rms, eps);
}

void gain_gradient(Recording& r, Arena::Frame& scratch, const TensorView& dy, const TensorView& x,
                   const TensorView& inv_rms, const Parameter& gain) {
    const std::uint64_t bytes = ops::rmsnorm_wgrad_workspace_bytes(x.extent[0], gain.info.size());
    ops::rmsnorm_wgrad(r, dy, x, inv_rms, gain.gradient, true, scratch.bytes(bytes));
}

void Linear::forward(Recording& r, Arena::Frame& scratch, const LinearRows& x, const TensorView& y,
                     bool accumulate) const {
    if (weight_.quantized)
        dense_product(r, scratch, products_, GemmForm::NT, x, weight_, y, accumulate);
    else if (!direct_product(r, products_, x.values, weight_.compute, y, accumulate))
        ops::gemm_nt(r, x.values, weight_.compute, y, accumulate);
}

void Linear::input_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                            const TensorView& dx, bool accumulate) const {
    if (weight_.quantized)
        dense_product(r, scratch, products_, GemmForm::NN, dy, weight_, dx, accumulate);
    else if (!direct_product(r, products_, dy.values, weight_.turned, dx, accumulate))
        ops::gemm_nn(r, dy.values, weight_.compute, dx, accumulate);
}

void Linear::weight_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                             const LinearRows& x) const {
    if (!weight_.quantized) {
        ops::gemm_tn(r, dy.values, x.values, weight_.gradient, true);
        return;
    }
    Arena::Frame work = scratch.nested();
    const std::uint64_t in = weight_.gradient.extent[1];
    const fp8::Operand a = along_rows(r, work, dy, products_, in),
                       b = along_rows(r, work, x, products_, in);
    const auto [way, workspace] =
        means_of(r, work, products_, GemmForm::TN, a, b, weight_.gradient);
    fp8::gemm_tn(r, a, b, weight_.gradient, true, workspace, way);
    scratch.cover(work);
}

void ExpertLinear::forward(Recording& r, Arena::Frame& scratch, const LinearRows& x,
                           const TensorView& y, const fp8::GroupedRows& rows) const {
    if (weights_.quantized)
        expert_product(r, scratch, products_, GemmForm::NT, x, weights_, y, rows);
    else if (!direct_product(r, products_, x.values, weights_.compute, y, false, &rows))
        ops::grouped_gemm_nt(r, x.values, weights_.compute, y, rows.tiles);
}

std::optional<fp8::Variant> ExpertLinear::streams(const Recording& r, const fp8::Quantized& x,
                                                  const TensorView& y,
                                                  const fp8::GroupedRows& by_ids) const {
    if (!weights_.quantized)
        return std::nullopt;
    const fp8::Operand weights = weights_for(weights_, GemmForm::NT);
    const fp8::Way way = products_.way(r.device(), GemmForm::NT, x, weights, y, &by_ids);
    if (way.variant != fp8::Variant::Streamed &&
        !fp8::reads_layout(r.device(), x, weights, y, by_ids, way))
        return std::nullopt;
    return way.variant;
}

void ExpertLinear::input_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                                  const TensorView& dx, const fp8::GroupedRows& rows) const {
    if (weights_.quantized)
        expert_product(r, scratch, products_, GemmForm::NN, dy, weights_, dx, rows);
    else if (!direct_product(r, products_, dy.values, weights_.turned, dx, false, &rows))
        ops::grouped_gemm_nn(r, dy.values, weights_.compute, dx, rows.tiles);
}

void ExpertLinear::weight_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                                   const LinearRows& x, const fp8::GroupedRows& rows) const {
    if (!weights_.quantized) {
        ops::grouped_gemm_tn(r, dy.values, x.values, weights_.gradient, rows.layout.values, true);
        return;
    }
    Arena::Frame work = scratch.nested();
    const std::uint64_t in = weights_.gradient.extent[2];
    const fp8::Operand a = along_rows(r, work, dy, products_, in, &rows),
                       b = along_rows(r, work, x, products_, in, &rows);
    const auto [way, workspace] =
        means_of(r, work, products_, GemmForm::TN, a, b, weights_.gradient, &rows);
    fp8::k_grouped_gemm_tn(r, a, b, weights_.gradient, rows, true, workspace, way);
    scratch.cover(work);
}

} // namespace bellows
