// SPDX-License-Identifier: MIT
#pragma once

// How a tensor is quantised: how a scale follows from its block, and tensors of codes and scales,
// whose recipes and shapes are in sizes.hpp. Plain values, any thread.
//
// value = code * scale; code = encode(x * inverse_scale(scale)).

#include <bellows/engine/tensor.hpp>
#include <bellows/fp8/format.hpp>
#include <bellows/fp8/sizes.hpp>

#include <cstdint>
#include <initializer_list>

namespace bellows::fp8 {

/// The scale of a block whose largest |x| is amax, the same bits as on any device:
///   amax NaN (a NaN anywhere in the block): NaN; all codes of the block are then kNanCode.
///   Otherwise a = min(max(amax, 1e-4), largest f32). An infinity in the block thus counts as the
///   largest f32 and is encoded as the largest code, as is all that exceeds it.
///   PowerOfTwo: the least 2^e >= a / largest(format), with e at most 119 for E4M3 and 112 for E5M2
///   (the floor of a keeps it above -23 and -30), so that every code * scale, the least subnormal
///   and the largest included, is a normal bf16. Beyond 448 * 2^119 values saturate.
///   F32: fl(a * c), c = fl(1 / 448) = 0x3B124925 or fl(1 / 57344) = 0x37924925.
float block_scale(Format format, ScaleRule rule, float amax) noexcept;

/// PowerOfTwo: 1 / scale, exact. F32: r of
///   r = f32 of the bits 0x7EF311C7 - bits(scale);  four times: r = fl(r * fl(2 - fl(scale * r)))
/// each operation rounded to nearest even; within 2^-23 of 1 / scale. No division, whose rounding
/// Vulkan leaves open, and no fused multiply-add, which a device may round twice. scale > 0 or NaN,
/// which stays NaN.
float inverse_scale(ScaleRule rule, float scale) noexcept;

/// Codes and scales of one tensor. Both are rank 2, or rank 3 with a batch (experts) first.
///   codes: [(batch,) rows, columns] f8; row stride a multiple of 16 codes. What stands between
///   `columns` and the next multiple of 16 is written as 0. Begins at a multiple of 16 bytes.
///   scales, row-major:
///     Rows128     [(batch,) rows, ceil(columns / 128)] f32
///     Columns128  [(batch,) ceil(rows / 128), columns] f32, row stride a multiple of 8
///     Blocks128   [(batch,) ceil(rows / 128), ceil(columns / 128)] f32
///     PerTensor   [1] f32
///     MX32        [(batch,) rows, ceil(columns / 32)] u8 (UE8M0), row stride a multiple of 4
///   group_offsets (Columns128 only, optional): [groups + 1] u32 on the device, ascending. Blocks
///   begin anew at each group's first row, group_offsets[g]; rows from group_offsets[groups] on
///   are absent. Scales are then [rows / 128 + groups, columns]: block j of group g has scale row
///   group_offsets[g] / 128 + g + j (rounded down), a place that no other block has.
/// codes.row_count is honoured where ops say so.
struct Quantized {
    TensorView codes;
    TensorView scales;
    Recipe recipe;
    TensorView group_offsets;
};

/// code * scale of a tensor, without codes and scales: for products that take its values
/// (Variant::Decoded) and nothing else. values: [(batch,) rows, columns] bf16, which holds them
/// exactly where scales are powers of two; row stride a multiple of 8, memory at a multiple of 16
/// bytes. group_offsets as of Quantized.
struct Decoded {
    TensorView values;
    Recipe recipe;
    TensorView group_offsets;
};

/// A tensor of [rows, columns] quantised as Columns128 whose codes stand transposed, with the rows
/// side by side: what units take that read both operands of a product along the sum (of a weight's
/// gradient, over rows). Every code and every scale has the bits that Quantized has.
///   codes: [columns, 128 * blocks] f8, contiguous; begins at a multiple of 16 bytes.
///   scales: [blocks, columns] f32 as of Columns128, row stride a multiple of 8: that of row block
///   b belongs to columns [128 * b, 128 * b + 128) of codes. Without group_offsets blocks =
///   ceil(rows / 128), and row r stands at column r of codes. With them (as of Quantized) blocks =
///   rows / 128 + groups, rounded down, and row r of group g stands at column 128 *
///   (group_offsets[g] / 128 + g) + r - group_offsets[g]: each group begins a block.
/// Behind the last row of a block its columns hold code 0. Blocks without a row that is there are
/// unspecified, codes and scales alike.
struct Transposed {
    TensorView codes;
    TensorView scales;
    Recipe recipe;
    TensorView group_offsets;
    std::uint64_t rows = 0;
};

/// Views of the shapes above: codes in `codes`, scales in `scales`, or one behind the other in
/// `memory`. group_offsets: [groups + 1] u32 or left out. Throws Error{InvalidArgument} when the
/// memory is too small.
Quantized make_quantized(BufferView codes, BufferView scales, const Recipe& recipe,
                         std::initializer_list<std::uint64_t> extents,
                         const TensorView& group_offsets = {});
Quantized make_quantized(BufferView memory, const Recipe& recipe,
                         std::initializer_list<std::uint64_t> extents,
                         const TensorView& group_offsets = {});

/// Views of that shape in `memory`. Throws as make_quantized does.
Decoded make_decoded(BufferView memory, const Recipe& recipe,
                     std::initializer_list<std::uint64_t> extents,
                     const TensorView& group_offsets = {});

/// Codes and scales of {rows, columns}, one behind the other in `memory` (transposed_bytes). Throws
/// as make_quantized does.
Transposed make_transposed(BufferView memory, const Recipe& recipe,
                           std::initializer_list<std::uint64_t> extents,
                           const TensorView& group_offsets = {});

} // namespace bellows::fp8
