// SPDX-License-Identifier: MIT
// What the kernels share that pack operands of fp8_packed_gemm: include/fp8_packed.glsl.
#ifndef BELLOWS_FP8_PACK_GLSL
#define BELLOWS_FP8_PACK_GLSL

#include "fp8_packed.glsl"

bool has_nan(uvec4 codes) {
    return (fp8_e4m3_nan_bits(codes) & 0x80808080u) != 0u;
}

bool is_nan(uvec4 codes, uint i) {
    return (codes[i / 4u] >> i % 4u * 8u & 0x7Fu) == 0x7Fu;
}

// Halves in the order of the codes.
uvec2 in_order(uvec2 pairs) {
    return uvec2(pairs.x & 0xFFFFu | pairs.y << 16, pairs.x >> 16 | pairs.y & 0xFFFF0000u);
}

// Eight codes from code 8 * part on, times 2^-8.
uvec4 eight_halves(uvec4 codes, uint part) {
    return uvec4(in_order(halves(codes[part * 2u])), in_order(halves(codes[part * 2u + 1u])));
}

// Two halves, those NaN whose codes, from code i on, are.
uint with_nans(uint pair, uvec4 codes, uint i) {
    pair |= is_nan(codes, i) ? 0x7E00u : 0u;
    return pair | (is_nan(codes, i + 1u) ? 0x7E000000u : 0u);
}

#endif
