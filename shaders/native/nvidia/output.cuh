// SPDX-License-Identifier: MIT
// Tiles of results: where they stand, and how the registers of a warpgroup reach memory.
#pragma once

#include "hopper.cuh"

#include <cuda_bf16.h>

namespace hopper {

__device__ __forceinline__ u32 tiles(u32 extent, u32 of) {
    return (extent + of - 1) / of;
}

/// The place of tile t of rows x columns: bands of kBand rows, so that those which run at once
/// share operands.
template <u32 kBand>
__device__ __forceinline__ void place(u32 t, u32 rows, u32 columns, u32& row, u32& column) {
    const u32 band = kBand * columns, first = t / band * kBand;
    const u32 height = min(rows - first, kBand), rest = t % band;
    row = first + rest % height;
    column = rest / height;
}

/// D, f32 or bf16.
struct Output {
    u64 memory; ///< of the first matrix
    u32 ld, columns;
    bool f32, accumulate;
    float alpha;
};

/// This thread's part of 64 rows x 2 kFloats columns from `column` on: two rows. here: which of them
/// D has; at: where they begin, in elements of D.
template <u32 kFloats>
__device__ __forceinline__ void store(const Output& out, float (&sums)[kFloats], u32 column,
                                      const bool (&here)[2], const u64 (&at)[2]) {
    constexpr u32 kEights = kFloats / 4, kTogether = kEights < 16 ? kEights : 16;
    const u32 quad = threadIdx.x % 4;
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        if (out.f32) {
            float* const d = reinterpret_cast<float*>(out.memory) + at[half];
#pragma unroll
            for (u32 first = 0; first < kEights; first += kTogether) {
                // All are read before the first is written: the compiler cannot know that they
                // are different ones.
                float2 old[kTogether];
#pragma unroll
                for (u32 j = 0; j < kTogether; ++j) {
                    const u32 c = column + 8 * (first + j) + 2 * quad;
                    old[j] = out.accumulate && here[half] && c < out.columns
                                 ? *reinterpret_cast<const float2*>(d + c)
                                 : make_float2(-0.0f, -0.0f); // nothing is added
                }
#pragma unroll
                for (u32 j = 0; j < kTogether; ++j) {
                    const u32 c = column + 8 * (first + j) + 2 * quad;
                    const float* const v = &sums[4 * (first + j) + 2 * half];
                    if (here[half] && c < out.columns)
                        *reinterpret_cast<float2*>(d + c) =
                            make_float2(__fadd_rn(__fmul_rn(v[0], out.alpha), old[j].x),
                                        __fadd_rn(__fmul_rn(v[1], out.alpha), old[j].y));
                }
            }
            continue;
        }
        __nv_bfloat16* const d = reinterpret_cast<__nv_bfloat16*>(out.memory) + at[half];
        // Four quads of 8 columns at a time: shuffles give each lane 8 columns side by side.
#pragma unroll
        for (u32 j = 0; j < kEights; j += 4) {
            u32 v[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                float x = sums[4 * (j + i) + 2 * half] * out.alpha;
                float y = sums[4 * (j + i) + 2 * half + 1] * out.alpha;
                const u32 c = column + 8 * (j + i) + 2 * quad;
                if (out.accumulate && here[half] && c < out.columns) {
                    const __nv_bfloat162 old = *reinterpret_cast<const __nv_bfloat162*>(d + c);
                    x += __low2float(old);
                    y += __high2float(old);
                }
                const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
                v[i] = *reinterpret_cast<const u32*>(&pair);
            }
            const u32 e = __shfl_xor_sync(~0u, quad & 1 ? v[0] : v[1], 1);
            const u32 f = __shfl_xor_sync(~0u, quad & 1 ? v[2] : v[3], 1);
            (quad & 1 ? v[0] : v[1]) = e;
            (quad & 1 ? v[2] : v[3]) = f;
            const u32 g = __shfl_xor_sync(~0u, quad & 2 ? v[0] : v[2], 2);
            const u32 h = __shfl_xor_sync(~0u, quad & 2 ? v[1] : v[3], 2);
            (quad & 2 ? v[0] : v[2]) = g;
            (quad & 2 ? v[1] : v[3]) = h;
            const u32 c = column + 8 * (j + quad);
            if (here[half] && c < out.columns)
                *reinterpret_cast<uint4*>(d + c) = make_uint4(v[0], v[1], v[2], v[3]);
        }
    }
}

} // namespace hopper
