// SPDX-License-Identifier: MIT
#pragma once

// Ops whose results go into FP8 products, quantised as they are computed: one dispatch, one pass
// over memory. Codes, scales and sums have the bits of the op of <bellows/engine/ops.hpp> in f32
// followed by quantize(); tensors stored beside them have that result's, rounded once. What
// quantize.hpp says of matrices, row counts and errors holds here too; columns and ffn are
// multiples of 4. Recipes have Rows128 blocks. The thread that owns the recording calls them.

#include <bellows/fp8/quantize.hpp>

namespace bellows::fp8 {

/// y = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps), quantised. x: [rows, columns] f32
/// or bf16; gain: [columns] f32, or bf16 where x is, at a multiple of 16 bytes; inv_rms (out):
/// [rows] f32; y: stored as well if it is given, like x. x.row_count is honoured.
void rmsnorm(Recording& recording, const TensorView& x, const TensorView& gain,
             const Quantized& quantized, const TensorView& inv_rms, float eps,
             const TensorView& y = {}, Form form = Form::Device);

/// hidden = silu(gate) * up (* row_weight), quantised. gate_up: [rows, 2 * ffn], gate first, f32,
/// bf16 or codes; row_weight: [rows] f32 (optional); hidden: [rows, ffn]. The row count of gate_up
/// (of its codes) is honoured, also a count for each so many rows.
void swiglu(Recording& recording, const TensorView& gate_up, const TensorView& row_weight,
            const Quantized& hidden, Form form = Form::Device);
void swiglu(Recording& recording, const Quantized& gate_up, const TensorView& row_weight,
            const Quantized& hidden, Form form = Form::Device);

/// Where swiglu_dgrad's results go: at least one of the first two.
struct SwigluGradients {
    Quantized quantized =
        {};                 ///< [rows, 2 * ffn], ffn a multiple of 128; codes without memory: none
    TensorView stored = {}; ///< [rows, 2 * ffn] like d_hidden; without memory: none
    TensorView d_row_weight = {}; ///< [rows] f32, present if and only if row_weight is
};

/// The gradients of swiglu by gate and up, gate first, and by the rows' weights. d_hidden: [rows,
/// ffn] f32 or bf16; gate_up: like d_hidden, or codes. to.stored may be gate_up. The row count of
/// gate_up (of its codes) is honoured.
void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const TensorView& gate_up,
                  const TensorView& row_weight, const SwigluGradients& to,
                  Form form = Form::Device);
void swiglu_dgrad(Recording& recording, const TensorView& d_hidden, const Quantized& gate_up,
                  const TensorView& row_weight, const SwigluGradients& to,
                  Form form = Form::Device);

} // namespace bellows::fp8
