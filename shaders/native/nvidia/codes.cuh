// SPDX-License-Identifier: MIT
// Values of bf16, e4m3 codes and their scales, with the bits of include/fp8.glsl.
#pragma once

#include "hopper.cuh"

#include <cuda_bf16.h>

namespace hopper {

__device__ __forceinline__ u32 bf16_pair(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const u32*>(&pair);
}
__device__ __forceinline__ float2 of_pair(u32 word) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}

/// most: the bits of the largest magnitude. powers: scales are powers of two.
__device__ __forceinline__ float block_scale(u32 most, bool powers) {
    if (most > 0x7f800000u)
        return __uint_as_float(0x7fc00000u);
    const u32 limited = min(max(most, 0x38d1b717u), 0x7f7fffffu); // 1e-4, the largest f32
    if (powers)
        return __uint_as_float(min(((limited + 0x1fffffu) >> 23) - 8, 246u) << 23);
    return __fmul_rn(__uint_as_float(limited), __uint_as_float(0x3b124925u));
}

__device__ __forceinline__ float inverse_scale(float scale, bool powers) {
    const u32 bits = __float_as_uint(scale);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return scale;
    if (powers)
        return __uint_as_float(0x7f000000u - bits);
    float inverse = __uint_as_float(0x7ef311c7u - bits);
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        inverse = __fmul_rn(inverse, __fsub_rn(2.0f, __fmul_rn(scale, inverse)));
    return inverse;
}

__device__ __forceinline__ u32 code_pair(float low, float high) {
    unsigned short codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
}

/// A warp's block of 128 values, four of each lane.
struct Block {
    u32 codes; ///< this lane's
    float scale;
};
__device__ __forceinline__ Block code_block(const float (&y)[4], bool powers) {
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        most = max(most, __float_as_uint(y[i]) & 0x7fffffffu);
    most = __reduce_max_sync(~0u, most);
    const float scale = block_scale(most, powers), inverse = inverse_scale(scale, powers);
    const u32 codes = code_pair(__fmul_rn(y[0], inverse), __fmul_rn(y[1], inverse)) |
                      code_pair(__fmul_rn(y[2], inverse), __fmul_rn(y[3], inverse)) << 16;
    return {most > 0x7f800000u ? 0x7f7f7f7fu : codes, scale};
}

} // namespace hopper
