// SPDX-License-Identifier: MIT
// The elements of matrices on matrix units: bf16, or f16 with MATRIX_BF16 = 0.
#ifndef BELLOWS_MATRIX_TYPE_GLSL
#define BELLOWS_MATRIX_TYPE_GLSL

#include "storage.glsl"

#if MATRIX_BF16
#define MATRIX_TYPE bfloat16_t
#else
#define MATRIX_TYPE float16_t
#endif

// bf16 codes, two to a word, in the matrix type.
uint matrix_codes(uint codes) {
#if MATRIX_BF16
    return codes;
#else
    return packHalf2x16(vec2(bf16_low(codes), bf16_high(codes)));
#endif
}

uvec2 matrix_pack(vec4 x) {
#if MATRIX_BF16
    return bf16_pack(x);
#else
    return uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
#endif
}

#endif
