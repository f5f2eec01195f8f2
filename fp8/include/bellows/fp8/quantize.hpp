// SPDX-License-Identifier: MIT
#pragma once

// Quantisation on the device: each function checks its tensors and records one dispatch (PerTensor:
// three). Nothing runs before the recording is submitted. The thread that owns the recording calls
// them.
//
// Common to all. Matrices are [rows, columns], or [batch, rows, columns] where "batch" is said, f32
// or bf16, strided: the last stride is 1, row and batch strides are multiples of 8 elements, memory
// begins at a multiple of 16 bytes. Any number of rows and columns; the elements between the last
// column and the next multiple of 8 belong to the row: they are not used, and unspecified in
// results. Codes and scales have the shapes of recipe.hpp. Where a row_count is named, only that
// many rows exist; the others are neither read nor written, and quantise as zero where a block
// holds such rows too. Results have the same bits on every device, and do not depend on what else
// is quantised. Every function throws Error{InvalidArgument} with names and shapes when tensors do
// not fit together or the recipe does not fit the op.

#include <bellows/engine/recording.hpp>
#include <bellows/fp8/recipe.hpp>

#include <cstdint>

namespace bellows::fp8 {

/// How a kernel shares out its work; the results are the same.
enum class Form : std::uint8_t {
    Device, ///< what suits the device
    Lanes,  ///< many invocations per block, shared memory: GPUs
    Few, ///< the same with as little for each as can be: GPUs that rows do not fill. Ops that have
         ///< no such form take Lanes
    Streams, ///< few invocations, no barrier within a row: CPU drivers
};

/// codes = x in the codes' format without a scale: nearest, ties to even, saturating; NaN is 0x7F.
/// x: f32, codes: f8, both contiguous with the same number of elements, a multiple of 4.
void encode(Recording& recording, const TensorView& x, const TensorView& codes);
/// y = the values of codes, exact. codes: f8, y: f32, as above.
void decode(Recording& recording, const TensorView& codes, const TensorView& y);

/// Any recipe; batch. x.row_count is honoured (without batch). quantized.group_offsets is honoured.
/// PerTensor takes one scale for the whole batch.
void quantize(Recording& recording, const TensorView& x, const Quantized& quantized,
              Form form = Form::Device);

/// The same bits as Columns128 codes and scales of x, with the codes transposed. No batch.
/// x.row_count and transposed.group_offsets are honoured.
void quantize(Recording& recording, const TensorView& x, const Transposed& transposed,
              Form form = Form::Device);

/// The same x as Rows128 and as Columns128 from one pass over memory; both of the same format and
/// scale rule. x.row_count and columns.group_offsets are honoured.
void quantize_rows_and_columns(Recording& recording, const TensorView& x, const Quantized& rows,
                               const Quantized& columns, Form form = Form::Device);

/// The values of x quantised by decoded.recipe, Columns128 with power-of-two scales: quantize() and
/// dequantize() in one pass, the same bits. batch; x.row_count and decoded.group_offsets are
/// honoured.
void quantize(Recording& recording, const TensorView& x, const Decoded& decoded,
              Form form = Form::Device);

/// columns = the values of rows (Rows128) quantised anew as Columns128, for a weight's gradient.
/// The formats may differ, the scale rule may too. rows.codes.row_count and columns.group_offsets
/// are honoured.
void requantize(Recording& recording, const Quantized& rows, const Quantized& columns,
                Form form = Form::Device);
/// The values of these columns, with power-of-two scales.
void requantize(Recording& recording, const Quantized& rows, const Decoded& columns,
                Form form = Form::Device);
/// The same columns with their codes transposed.
void requantize(Recording& recording, const Quantized& rows, const Transposed& columns,
                Form form = Form::Device);

/// Where rows stand that are read by slots, as products read them (GroupedRows).
struct RowsBySlots {
    TensorView slots;                  ///< i32, contiguous: the slot of each row, none below 0
    std::uint32_t slots_per_a_row = 1; ///< row r stands at row slots[r] / slots_per_a_row
};
/// The same of rows that stand by slots, `rows` as many as there are tokens, columns as many as
/// slots: row r of columns is that of slots[r]. slots.row_count and columns.group_offsets are
/// honoured, rows' row_count is not looked at.
void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Quantized& columns, Form form = Form::Device);
void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Decoded& columns, Form form = Form::Device);
void requantize(Recording& recording, const Quantized& rows, const RowsBySlots& by,
                const Transposed& columns, Form form = Form::Device);

/// The same codes, transposed: of weights (Blocks128, whose scales are then read transposed) for a
/// product that sums over their rows. codes: [N, K] or [batch, N, K] f8; transposed: [K, N] or
/// [batch, K, N] of the same type, not overlapping codes; each with the row strides and the padding
/// of Quantized::codes, which is written as 0. Some matrices of a batch are rows() of both.
void transpose_codes(Recording& recording, const TensorView& codes, const TensorView& transposed);

/// The same of Columns128 codes of a matrix, as Transposed::codes has them; group_offsets are
/// honoured, columns.codes.row_count is none.
void transpose_codes(Recording& recording, const Quantized& columns, const TensorView& transposed);

/// y = code * scale; batch. Any recipe. y: f32, or bf16 rounded to nearest even, which is exact for
/// power-of-two scales. quantized.codes.row_count and .group_offsets are honoured.
void dequantize(Recording& recording, const Quantized& quantized, const TensorView& y,
                Form form = Form::Device);

} // namespace bellows::fp8
