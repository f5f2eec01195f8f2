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

// --- f32 results through shared memory: copies write them, or add them in the device's cache, while
// --- the warpgroup goes on with its next tile

constexpr u32 kPieceColumns = 64;
constexpr u32 kPieceRow = 4 * kPieceColumns + 32; // bytes; rows that a warp writes are in different banks
constexpr u32 kPieceBytes = 64 * kPieceRow;
constexpr u32 kPieces = 2; // of a warpgroup, in turn

/// Until all but the last kLeft pieces of this thread have been read from shared memory.
template <u32 kLeft>
__device__ __forceinline__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
}
/// Until what this thread's copies write has been written.
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// 64 rows x 2 kFloats columns of a warpgroup's sums to D, which is f32, from `row` and `column` on.
/// at: where D's row `row` begins, in elements; end: of its rows. pieces: shared memory of this
/// warpgroup, kPieces of them; barrier: its own.
template <u32 kFloats>
__device__ __forceinline__ void store_by_copies(const Output& out, float (&sums)[kFloats], u32 row,
                                                u32 end, u32 column, u64 at, u32 pieces,
                                                u32 barrier) {
    constexpr u32 kEights = kPieceColumns / 8;
    const u32 thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    const u32 mine = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (u32 piece = 0; piece < 2 * kFloats / kPieceColumns; ++piece) {
        const u32 to = pieces + piece % kPieces * kPieceBytes;
        if (thread < 64)
            wait_for_reads<kPieces - 1>();
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
#pragma unroll
        for (u32 half = 0; half < 2; ++half)
#pragma unroll
            for (u32 j = 0; j < kEights; ++j) {
                const float* const v = &sums[4 * (piece * kEights + j) + 2 * half];
                asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(
                                 to + (mine + 8 * half) * kPieceRow + 32 * j + 8 * (lane % 4)),
                             "f"(__fmul_rn(v[0], out.alpha)), "f"(__fmul_rn(v[1], out.alpha))
                             : "memory");
            }
        fence_shared_writes();
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
        if (thread < 64) {
            const u32 c = column + piece * kPieceColumns;
            if (row + thread < end && c < out.columns) {
                const float* const d = reinterpret_cast<const float*>(out.memory) + at +
                                       static_cast<u64>(thread) * out.ld + c;
                const u32 bytes = 4 * min(out.columns - c, kPieceColumns);
                const u32 from = to + thread * kPieceRow;
                if (out.accumulate)
                    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], "
                                 "[%1], %2;" ::"l"(d),
                                 "r"(from), "r"(bytes)
                                 : "memory");
                else
                    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                                     d),
                                 "r"(from), "r"(bytes)
                                 : "memory");
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
}

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
