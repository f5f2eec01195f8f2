// SPDX-License-Identifier: MIT
#pragma once

// Slices, copies, transposition, casts and sums, element by element. The contract that all ops
// share stands in ops.hpp.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/tensor.hpp>

#include <cstdint>

namespace bellows::ops {

/// [first, first + count) of one dimension, strides kept.
TensorView slice(const TensorView& view, std::uint32_t dimension, std::uint64_t first,
                 std::uint64_t count);

/// Of as many bytes, a multiple of 16, as are the offsets; on a role that takes dispatches. What
/// Recording::copy() does, which drivers of GPUs do at a third of the memory's rate on such queues.
void copy_bytes(Recording& recording, BufferView source, BufferView destination);

/// y = x, or y += x. Both act, of the same one to three extents, strided.
void copy(Recording& recording, const TensorView& x, const TensorView& y, bool accumulate = false);

/// y = transpose(x), bit by bit. x: [rows, columns] or [batch, rows, columns] of elements of two or
/// four bytes, strided; y: [columns, rows] or [batch, columns, rows] of the same type, strided, not
/// overlapping x. A matrix has up to 4 GiB, a batch any number of them.
void transpose(Recording& recording, const TensorView& x, const TensorView& y);

/// y = alpha * x; y may be x. x, y: contiguous, act, same number of elements.
void scale(Recording& recording, const TensorView& x, const TensorView& y, float alpha);
/// y = alpha * a + beta * b; y may be a or b.
void add(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& y,
         float alpha = 1, float beta = 1);
/// f32 to bf16 (round to nearest even) or back; the same type: a copy.
void cast(Recording& recording, const TensorView& x, const TensorView& y);

} // namespace bellows::ops
