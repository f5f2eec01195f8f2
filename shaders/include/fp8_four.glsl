// SPDX-License-Identifier: MIT
// Four consecutive elements of a row of f32, bf16 or FP8 with scales of 128 columns (Rows128), as the
// variant's INPUT_FP8 or STORAGE_BF16 says. X4 is the operand's element. INPUT_F16: FP8 is decoded in
// f16 arithmetic where it can be. The kernel declares the constant input_format.
#ifndef BELLOWS_FP8_FOUR_GLSL
#define BELLOWS_FP8_FOUR_GLSL

#include "activation.glsl"
#include "fp8.glsl"

#ifndef INPUT_FP8
#define INPUT_FP8 0
#endif

#if INPUT_F16
#include "fp8_pairs.glsl"
#endif

#if INPUT_FP8
#define X4 uint
struct Raw4 {
    uint codes;
    float scale;
};
// READ4(tensor, row, stride4, scales, scales_stride, c): the four c of a row.
#define READ4(tensor, row, stride4, scales, scales_stride, c)                                      \
    Raw4(tensor.v[(row) * (stride4) + (c)], scales.v[(row) * (scales_stride) + (c) / 32u])
#define VALUE4(raw) (fp8_decode4(input_format, (raw).codes) * (raw).scale)
const Raw4 kNothing4 = Raw4(0u, 0.0);
#else
#define X4 S4
#define Raw4 S4
#define READ4(tensor, row, stride4, scales, scales_stride, c) tensor.v[(row) * (stride4) + (c)]
#define VALUE4(raw) load4(raw)
const Raw4 kNothing4 = S4(0);
#endif

#endif
