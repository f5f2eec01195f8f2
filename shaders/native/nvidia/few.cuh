// SPDX-License-Identifier: MIT
// What Hopper's products of few rows share: rows of weights are the units' 64 rows, and rows of A
// their columns, of which they take any eight. A team of 128 threads takes 64 columns of D; each
// copies its part of a stage by 16 bytes, and a wait for all of them takes the place of barriers for
// each stage.
#pragma once

#include "hopper.cuh"

#include <cuda_bf16.h>

namespace hopper {

constexpr u32 kThreads = 128, kColumns = 64;   // of a team, and of D
constexpr u32 kMostRows = 64;                  // of A at once
constexpr u32 kRowBytes = 128;                 // of a row in a stage
constexpr u32 kWeightBytes = 64 * kRowBytes;   // of a stage
constexpr u32 kMostStages = 12;
constexpr u32 kPitch = kColumns + 4;           // words of a row of sums in shared memory

/// A warpgroup with memory and a barrier of its own.
struct Team {
    u32 thread, barrier;
    unsigned char* memory; ///< shared, at a multiple of 1024 bytes

    __device__ __forceinline__ void sync() const {
        asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory");
    }
};

/// Copies 16 bytes of which `there` exist, and zeros.
__device__ __forceinline__ void copy_16(u32 to, u64 from, u32 there) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(there)
                 : "memory");
}
__device__ __forceinline__ void commit_copies() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <u32 kLeft>
__device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Stages of so many rows that fit into the ring's bytes.
template <u32 kRows, u32 kBytes>
constexpr u32 kStagesOf = kBytes / (kWeightBytes + kRows * kRowBytes) < kMostStages
                              ? kBytes / (kWeightBytes + kRows * kRowBytes)
                              : kMostStages;

#define BELLOWS_LIST4 "%0, %1, %2, %3"
#define BELLOWS_LIST8 BELLOWS_LIST4 ", %4, %5, %6, %7"
#define BELLOWS_LIST12 BELLOWS_LIST8 ", %8, %9, %10, %11"
#define BELLOWS_LIST16 BELLOWS_LIST12 ", %12, %13, %14, %15"
#define BELLOWS_LIST24 BELLOWS_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define BELLOWS_COMMA ,
/// Gives f(rows, outs, list, x, y, last) for each number of rows: the sums of an invocation, and the
/// numbers of the operands behind them.
#define BELLOWS_FOR_ROWS(f)                                                                        \
    f(8, BELLOWS_OUT4(0), BELLOWS_LIST4, "4", "5", "6")                                            \
    f(16, BELLOWS_OUT4(0) BELLOWS_COMMA BELLOWS_OUT4(4), BELLOWS_LIST8, "8", "9", "10")            \
    f(24, BELLOWS_OUT4(0) BELLOWS_COMMA BELLOWS_OUT4(4) BELLOWS_COMMA BELLOWS_OUT4(8),             \
      BELLOWS_LIST12, "12", "13", "14")                                                            \
    f(32, BELLOWS_OUT16(0), BELLOWS_LIST16, "16", "17", "18")                                      \
    f(48, BELLOWS_OUT16(0) BELLOWS_COMMA BELLOWS_OUT4(16) BELLOWS_COMMA BELLOWS_OUT4(20),          \
      BELLOWS_LIST24, "24", "25", "26")                                                            \
    f(64, BELLOWS_OUT32(0), BELLOWS_LIST32, "32", "33", "34")

/// 64 rows of weights by some rows of A, 32 codes of E4M3 of k each, added to d or not.
#define BELLOWS_MULTIPLY_CODES(rows, outs, list, a, b, p)                                          \
    __device__ __forceinline__ void multiply_few(float (&d)[rows / 2], u64 x, u64 y, bool add) {   \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" p ", 0; "                                   \
                     "wgmma.mma_async.sync.aligned.m64n" #rows "k32.f32.e4m3.e4m3 {" list          \
                     "}, %" a ", %" b ", p, 1, 1;}"                                                \
                     : outs                                                                        \
                     : "l"(x), "l"(y), "r"(static_cast<u32>(add)));                                \
    }
BELLOWS_FOR_ROWS(BELLOWS_MULTIPLY_CODES)

/// Adds four sums of 128 of k from `first` on: those of even rows by scale.x, of odd ones by scale.y.
template <u32 kSums>
__device__ __forceinline__ void add_scaled(float (&sums)[kSums], const float (&part)[kSums], u32 first,
                                           float2 scale) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
        float &x = sums[first + 2 * half], &y = sums[first + 2 * half + 1];
        x = __fmaf_rn(part[first + 2 * half], scale.x, x);
        y = __fmaf_rn(part[first + 2 * half + 1], scale.y, y);
    }
}

/// D = f(kRows) for the fewest rows that units have for `rows`.
#define BELLOWS_WITH_ROWS(rows, call)                                                              \
    do {                                                                                           \
        if ((rows) <= 8) {                                                                         \
            call(8);                                                                               \
        } else if ((rows) <= 16) {                                                                 \
            call(16);                                                                              \
        } else if ((rows) <= 24) {                                                                 \
            call(24);                                                                              \
        } else if ((rows) <= 32) {                                                                 \
            call(32);                                                                              \
        } else if ((rows) <= 48) {                                                                 \
            call(48);                                                                              \
        } else {                                                                                   \
            call(64);                                                                              \
        }                                                                                          \
    } while (false)

/// Where a turn's results go.
struct Results {
    u64 d;
    u32 ldd, column, columns; ///< columns of D from `column` on
    u32 rows;
    float alpha;
    bool f32, accumulate;
};

/// What a bf16 D holds before products are made, this thread's part of it.
template <u32 kRows>
struct Before {
    uint4 of[(kRows + 15) / 16];
};

template <u32 kRows, class Places>
__device__ __forceinline__ void read_before(const Team& team, const Results& to,
                                            const Places& places, Before<kRows>& before) {
    const u32 column = 8 * (team.thread % 8);
    if (!to.accumulate || to.f32 || column >= to.columns)
        return;
#pragma unroll
    for (u32 j = 0; j < (kRows + 15) / 16; ++j) {
        const u32 r = team.thread / 8 + 16 * j;
        if (r < to.rows)
            before.of[j] = *reinterpret_cast<const uint4*>(
                to.d + 2 * (static_cast<u64>(places.d_row(r)) * to.ldd + to.column + column));
    }
}

/// Sums to D. Rows of D are what the units have as columns: they turn in `turned`, shared memory that
/// the team uses for nothing else then.
template <u32 kRows, class Places>
__device__ __forceinline__ void store_turned(const Team& team, const Results& to,
                                             const Places& places, const Before<kRows>& before,
                                             float (&sums)[kRows / 2], float* turned) {
    const u32 lane = team.thread % 32, warp = team.thread / 32, quad = lane % 4;
#pragma unroll
    for (u32 j = 0; j < kRows / 8; ++j)
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            turned[(8 * j + 2 * quad + i % 2) * kPitch + warp * 16 + lane / 4 + i / 2 * 8] =
                __fmul_rn(sums[4 * j + i], to.alpha);
    team.sync();
    const u32 column = 8 * (team.thread % 8);
#pragma unroll
    for (u32 j = 0; j < (kRows + 15) / 16; ++j) {
        const u32 r = team.thread / 8 + 16 * j;
        if (r >= to.rows || column >= to.columns)
            continue;
        const float4* const from = reinterpret_cast<const float4*>(turned + r * kPitch + column);
        const float4 first = from[0], second = from[1];
        float v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
        const u64 element = static_cast<u64>(places.d_row(r)) * to.ldd + to.column + column;
        if (to.f32) {
            float4* const d = reinterpret_cast<float4*>(to.d + 4 * element);
            if (to.accumulate) {
                const float4 a = d[0], b = d[1];
                v[0] += a.x, v[1] += a.y, v[2] += a.z, v[3] += a.w;
                v[4] += b.x, v[5] += b.y, v[6] += b.z, v[7] += b.w;
            }
            d[0] = make_float4(v[0], v[1], v[2], v[3]);
            d[1] = make_float4(v[4], v[5], v[6], v[7]);
            continue;
        }
        u32 words[4];
        const u32 olds[4] = {before.of[j].x, before.of[j].y, before.of[j].z, before.of[j].w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (to.accumulate) {
                const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&olds[i]);
                v[2 * i] += __low2float(pair);
                v[2 * i + 1] += __high2float(pair);
            }
            const __nv_bfloat162 pair = __floats2bfloat162_rn(v[2 * i], v[2 * i + 1]);
            words[i] = *reinterpret_cast<const u32*>(&pair);
        }
        *reinterpret_cast<uint4*>(to.d + 2 * element) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
}

} // namespace hopper
