// SPDX-License-Identifier: MIT
#pragma once

// Sums over many elements, clipping and AdamW. The contract that all ops share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/sizes.hpp>
#include <bellows/engine/tensor.hpp>

#include <array>
#include <cstdint>

namespace bellows::ops {

/// One f32 per 4096 elements of x (act, contiguous): the sum of the elements, or of their squares.
/// partials: [num_partials(elements of x)] f32. The partials of many tensors may stand side by
/// side.
void sum_partials(Recording& recording, const TensorView& x, const TensorView& partials);
void sum_squares_partials(Recording& recording, const TensorView& x, const TensorView& partials);

/// The sum of values: [count] f32 in ascending order as a pair result: [2] f32 (high, low) of about
/// 48 bits.
void sum_pairs(Recording& recording, const TensorView& values, const TensorView& result,
               BufferView workspace);

/// result: [2] f32 = {min(1, max_norm / norm), norm} with norm = sqrt(high + low) of sum_squares:
/// [2] f32. max_norm 0: the coefficient is 1.
void clip_coefficient(Recording& recording, const TensorView& sum_squares, const TensorView& result,
                      float max_norm);

struct AdamwOptions {
    float beta1 = 0.9f;
    float beta2 = 0.95f;
    float eps = 1e-8f;
    float weight_decay = 0.1f;
};

/// What adamw reads on the device in step `step` (from 1 on): the learning rate and both bias
/// corrections, computed in f64. It stands in memory so that a recording serves every step.
std::array<float, 3> adamw_scalars(const AdamwOptions& options, double lr, std::uint64_t step);

/// weight: f32, gradient: f32, m, v: f32 or bf16, weight_copy: bf16 (optional), all contiguous with
/// the same number of elements; scalars: [3] f32; clip: [1] f32 or more (optional), the first
/// multiplies the gradient.
void adamw(Recording& recording, const TensorView& weight, const TensorView& gradient,
           const TensorView& m, const TensorView& v, const TensorView& weight_copy,
           const TensorView& scalars, const TensorView& clip, const AdamwOptions& options);

} // namespace bellows::ops
