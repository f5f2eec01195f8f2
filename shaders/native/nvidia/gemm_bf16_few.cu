// SPDX-License-Identifier: MIT
// Products of bf16 tensors for few rows on Hopper's warpgroup units: what gemm_bf16.cu computes as nt
// and nn, bit for bit, where D has few tiles or weights take longer to read than to multiply.
//
//   nt   D = alpha * A * transpose(B) (+ D), A [m, k], B [n, k]
//   nn   D = alpha * A * B (+ D), A [m, k], B [k, n]
//
// Limits    a, b, d begin at multiples of 16 bytes; leading dimensions, strides and n are multiples
//           of 8 elements.
// Launch    128 threads; x: turns of 64 rows, y: 64 columns of D each, z: batches.
#include "few.cuh"

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr u32 kDepth = 64;                 // of k in a stage
constexpr u32 kRingBytes = 108 * 1024;

#define BELLOWS_MULTIPLY(rows, outs, list, x, y, by_k)                                             \
    template <bool kByK>                                                                           \
    __device__ __forceinline__ void multiply_few(float (&d)[rows / 2], u64 a, u64 b) {             \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.bf16.bf16 {" list          \
                     "}, %" x ", %" y ", 1, 1, 1, %" by_k ", 0;"                                   \
                     : outs                                                                        \
                     : "l"(a), "l"(b), "n"(kByK));                                                 \
    }
BELLOWS_FOR_ROWS(BELLOWS_MULTIPLY)

struct Few {
    const u64* operands; ///< a, b, d
    u32 m, n, k, lda, ldb, ldd, stride_a, stride_b, stride_d;
    u32 f32, accumulate;
    float alpha;
};

struct Places {
    u32 first;
    __device__ u32 d_row(u32 r) const { return first + r; }
};

/// kByK: memory has k as the rows of B.
template <bool kByK, u32 kRows>
__device__ __forceinline__ void take_rows(const Team& team, const Few& push, const Results& to, u64 a, u64 b,
                                          const Places& places) {
    constexpr u32 kStages = kStagesOf<kRows, kRingBytes>, kPasses = (kRows + 15) / 16;
    const u32 ring = shared_address(team.memory), blocks = (push.k + kDepth - 1) / kDepth;
    const u32 chunk = team.thread % 8, row = team.thread / 8;
    const u32 swizzled = row * kRowBytes + ((chunk ^ row % 8) << 4);
    const auto weights_at = [&](u32 stage) { return ring + stage * kWeightBytes; };
    const auto rows_at = [&](u32 stage) {
        return ring + kStages * kWeightBytes + stage * kRows * kRowBytes;
    };
    const auto copy = [&](u32 stage, u32 block) {
        const u32 at = block * kDepth + chunk * 8; // of k
        const u32 there = at >= push.k ? 0 : min(2 * (push.k - at), 16);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 r = row + 16 * j, to_row = weights_at(stage) + swizzled + j * 16 * kRowBytes;
            if (kByK) {
                const u32 k = block * kDepth + r, c = chunk * 8;
                const bool here = k < push.k && c < to.columns;
                copy_16(to_row, b + (here ? 2 * (static_cast<u64>(k) * push.ldb + c) : 0),
                        here ? 16 : 0);
            } else {
                copy_16(to_row,
                        b + 2 * (static_cast<u64>(min(r, to.columns - 1)) * push.ldb + (there ? at : 0)),
                        there);
            }
        }
#pragma unroll
        for (u32 j = 0; j < kPasses; ++j)
            if (row + 16 * j < to.rows)
                copy_16(rows_at(stage) + swizzled + j * 16 * kRowBytes,
                        a + 2 * (static_cast<u64>(row + 16 * j) * push.lda + (there ? at : 0)), there);
    };
#pragma unroll 1
    for (u32 i = 0; i < kStages - 1; ++i) {
        if (i < blocks)
            copy(i, i);
        commit_copies();
    }
    Before<kRows> before;
    read_before<kRows>(team, to, places, before);
    float sums[kRows / 2];
#pragma unroll
    for (u32 i = 0; i < kRows / 2; ++i)
        sums[i] = 0;
    u32 stage = 0, next = kStages - 1;
#pragma unroll 1
    for (u32 i = 0; i < blocks; ++i) {
        wait_for_groups<kStages - 2>();
        fence_shared_writes();
        team.sync();
        begin_products();
#pragma unroll
        for (u32 k = 0; k < kDepth / 16; ++k)
            multiply_few<kByK>(sums,
                               kByK ? descriptor(weights_at(stage) + k * 2048, kWeightBytes, 1024)
                                    : descriptor(weights_at(stage) + k * 32, 16, 1024),
                               descriptor(rows_at(stage) + k * 32, 16, 1024));
        commit_products();
        if (i + kStages - 1 < blocks)
            copy(next, i + kStages - 1);
        commit_copies();
        wait_for_products<0>();
        stage = stage + 1 == kStages ? 0 : stage + 1;
        next = next + 1 == kStages ? 0 : next + 1;
    }
    wait_for_groups<0>();
    team.sync();
    store_turned<kRows>(team, to, places, before, sums, reinterpret_cast<float*>(team.memory));
}

template <bool kByK>
__device__ __forceinline__ void take(const Few& push) {
    const u32 column = blockIdx.y * kColumns, first = blockIdx.x * kMostRows, batch = blockIdx.z;
    const u64* const o = push.operands;
    const u64 a = o[0] + 2 * (static_cast<u64>(batch) * push.stride_a +
                              static_cast<u64>(first) * push.lda);
    const u64 b = o[1] + 2 * (static_cast<u64>(batch) * push.stride_b +
                              static_cast<u64>(column) * (kByK ? 1 : push.ldb));
    const bool f32 = push.f32 != 0;
    const Results to = {o[2] + static_cast<u64>(batch) * push.stride_d * (f32 ? 4 : 2),
                        push.ldd,
                        column,
                        push.n - column,
                        min(push.m - first, kMostRows),
                        push.alpha,
                        f32,
                        push.accumulate != 0};
    const Places places{first};
    const Team team{threadIdx.x, 0, memory};
#define BELLOWS_TAKE_ROWS(rows) take_rows<kByK, rows>(team, push, to, a, b, places)
    BELLOWS_WITH_ROWS(to.rows, BELLOWS_TAKE_ROWS);
}

} // namespace

extern "C" __global__ void __launch_bounds__(128, 2) nt(const __grid_constant__ Few push) {
    take<false>(push);
}
extern "C" __global__ void __launch_bounds__(128, 2) nn(const __grid_constant__ Few push) {
    take<true>(push);
}
