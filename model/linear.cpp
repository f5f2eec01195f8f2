// SPDX-License-Identifier: MIT
#include "linear.hpp"

#include <bellows/engine/ops.hpp>
#include <bellows/fp8/fused.hpp>
#include <bellows/fp8/gemm.hpp>
#include <bellows/fp8/quantize.hpp>

namespace bellows {

namespace {

/// Its bits follow from the device's numeric class of bf16 products, which a run's ranks agree on
/// and checkpoints keep, and not from the number of rows.
constexpr fp8::Variant kVariant = fp8::Variant::Decoded;

/// In blocks along the features, for forward products and input gradients.
fp8::Quantized along_features(Recording& r, Arena::Frame& scratch, const LinearRows& x) {
    if (x.codes)
        return *x.codes;
    const std::uint64_t rows = x.values.extent[0], columns = x.values.extent[1];
    const fp8::Quantized q = rows_in(scratch, rows, columns);
    fp8::quantize(r, x.values, q);
    return q;
}

/// In blocks along the rows, for weight gradients. group_offsets: of experts' rows.
fp8::Quantized along_rows(Recording& r, Arena::Frame& scratch, const LinearRows& x,
                          const TensorView& group_offsets = {}) {
    if (x.columns)
        return *x.columns;
    const TensorView& shape = x.codes ? x.codes->codes : x.values;
    const std::uint64_t rows = shape.extent[0], columns = shape.extent[1];
    const std::uint64_t groups = group_offsets.buffer ? group_offsets.extent[0] - 1 : 0;
    const fp8::Quantized q = fp8::make_quantized(
        scratch.bytes(fp8::quantized_bytes(kColumnsRecipe, {rows, columns}, groups)),
        kColumnsRecipe, {rows, columns}, group_offsets);
    if (x.values.buffer)
        fp8::quantize(r, x.values, q);
    else
        fp8::requantize(r, *x.codes, q);
    return q;
}

BufferView workspace_for(Recording& r, Arena::Frame& scratch, const fp8::Operand& a,
                         const fp8::Operand& b) {
    return scratch.bytes(fp8::gemm_workspace_bytes(r.device(), a, b));
}

/// d = x by `weight` (+ d). FP8 products add to f32 tensors alone: a bf16 one is widened first, so
/// that it is rounded once.
void dense_product(Recording& r, Arena::Frame& scratch, decltype(fp8::gemm_nt)& product,
                   const LinearRows& x, const fp8::Quantized& weight, const TensorView& d,
                   bool accumulate) {
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_features(r, work, x);
    const BufferView workspace = workspace_for(r, work, a, weight);
    if (!accumulate || d.dtype == DType::F32) {
        product(r, a, weight, d, accumulate, workspace, kVariant);
    } else {
        const TensorView sum = work.tensor(DType::F32, {d.extent[0], d.extent[1]});
        ops::cast(r, d, sum);
        product(r, a, weight, sum, true, workspace, kVariant);
        ops::cast(r, sum, d);
    }
    scratch.cover(work);
}

/// d = x by the weights of each row's expert.
void expert_product(Recording& r, Arena::Frame& scratch,
                    decltype(fp8::m_grouped_gemm_nt_contiguous)& product, const LinearRows& x,
                    const fp8::Quantized& weights, const TensorView& d,
                    const fp8::GroupedRows& rows) {
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_features(r, work, x);
    product(r, a, weights, d, rows, false, workspace_for(r, work, a, weights), kVariant);
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

void normalise(Recording& r, const TensorView& x, const TensorView& gain, const LinearRows& y,
               const TensorView& inv_rms, float eps) {
    if (y.codes)
        fp8::rmsnorm(r, x, gain, *y.codes, inv_rms, eps, y.values);
    else
        ops::rmsnorm_forward(r, x, gain, y.values, inv_rms, eps);
}

void Linear::forward(Recording& r, Arena::Frame& scratch, const LinearRows& x, const TensorView& y,
                     bool accumulate) const {
    if (weight_.quantized)
        dense_product(r, scratch, fp8::gemm_nt, x, *weight_.quantized, y, accumulate);
    else
        ops::gemm_nt(r, x.values, weight_.compute, y, accumulate);
}

void Linear::input_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                            const TensorView& dx, bool accumulate) const {
    if (weight_.quantized)
        dense_product(r, scratch, fp8::gemm_nn, dy, *weight_.quantized, dx, accumulate);
    else
        ops::gemm_nn(r, dy.values, weight_.compute, dx, accumulate);
}

void Linear::weight_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                             const LinearRows& x) const {
    if (!weight_.quantized) {
        ops::gemm_tn(r, dy.values, x.values, weight_.gradient, true);
        return;
    }
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_rows(r, work, dy), b = along_rows(r, work, x);
    fp8::gemm_tn(r, a, b, weight_.gradient, true, workspace_for(r, work, a, b), kVariant);
    scratch.cover(work);
}

void ExpertLinear::forward(Recording& r, Arena::Frame& scratch, const LinearRows& x,
                           const TensorView& y, const fp8::GroupedRows& rows) const {
    if (weights_.quantized)
        expert_product(r, scratch, fp8::m_grouped_gemm_nt_contiguous, x, *weights_.quantized, y,
                       rows);
    else
        ops::grouped_gemm_nt(r, x.values, weights_.compute, y, rows.tiles);
}

void ExpertLinear::input_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                                  const TensorView& dx, const fp8::GroupedRows& rows) const {
    if (weights_.quantized)
        expert_product(r, scratch, fp8::m_grouped_gemm_nn_contiguous, dy, *weights_.quantized, dx,
                       rows);
    else
        ops::grouped_gemm_nn(r, dy.values, weights_.compute, dx, rows.tiles);
}

void ExpertLinear::weight_gradient(Recording& r, Arena::Frame& scratch, const LinearRows& dy,
                                   const LinearRows& x, const fp8::GroupedRows& rows) const {
    const TensorView& offsets = rows.layout.values;
    if (!weights_.quantized) {
        ops::grouped_gemm_tn(r, dy.values, x.values, weights_.gradient, offsets, true);
        return;
    }
    Arena::Frame work = scratch.nested();
    const fp8::Quantized a = along_rows(r, work, dy, offsets), b = along_rows(r, work, x, offsets);
    fp8::k_grouped_gemm_tn(r, a, b, weights_.gradient, rows, true, workspace_for(r, work, a, b),
                           kVariant);
    scratch.cover(work);
}

} // namespace bellows
