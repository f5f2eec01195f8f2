// SPDX-License-Identifier: MIT
// What mla_queries.comp computes, for more rows and bf16 alone, on Hopper's matrix units: each head's
// first part of the queries times W_UK, a product in f32, beside the rotated second part.
//
//   q [rows, heads, nope + rope], weights [heads, nope, latent], y [rows, heads, latent + rope]
//   positions [rows] u32, table [positions, rope / 2, 2] f32
//
// Limits    rows begin at multiples of 16 bytes; nope is a multiple of 16, rope of 4.
// Launch    256 threads; x: 512 columns of latent, y: heads, z: 16 * TILES rows. TILES is 1 or 2:
//           entries rows_16 and rows_32. A warp has 64 columns, whose weights it reads as its units
//           take them: a lane has eight neighbouring columns of four rows of weights.
#include "codes.cuh"

namespace {

using namespace hopper;

constexpr u32 kThreads = 256, kWarpColumns = 64, kColumns = 512;
constexpr u32 kDepth = 16; // of nope at once
constexpr u32 kAhead = 4;  // steps whose weights are on their way

struct Queries {
    const u64* operands;
    u32 rows, nope, latent, rope;
    u32 q_row, q_head, weights_row, weights_head, y_row, y_head; ///< strides in elements
};
enum Operand { kQ, kWeights, kTable, kPositions, kY };

/// Four rows of weights.
struct Weights {
    uint4 rows[4];
};

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// One of eight columns of two rows.
__device__ __forceinline__ u32 pair_of(const uint4& first, const uint4& second, u32 column) {
    const u32 a[4] = {first.x, first.y, first.z, first.w},
              b[4] = {second.x, second.y, second.z, second.w};
    return __byte_perm(a[column / 2], b[column / 2], column % 2 == 0 ? 0x5410 : 0x7632);
}

template <u32 kTiles>
__device__ __forceinline__ void take_rows(const Queries& push) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, eighth = lane / 4;
    const u32 head = blockIdx.y, first = blockIdx.z * 16 * kTiles;
    const u32 column = blockIdx.x * kColumns + warp * kWarpColumns;
    if (column < push.latent) {
        const u64 weights = push.operands[kWeights] +
                            2 * (static_cast<u64>(head) * push.weights_head +
                                 4 * quad * static_cast<u64>(push.weights_row) +
                                 min(column + 8 * eighth, push.latent - 8));
        const auto read = [&](u32 step) {
            Weights w;
#pragma unroll
            for (u32 i = 0; i < 4; ++i)
                w.rows[i] = __ldg(reinterpret_cast<const uint4*>(
                    weights + 2 * static_cast<u64>(step * kDepth + i) * push.weights_row));
            return w;
        };
        u64 q[kTiles][2];
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (u32 half = 0; half < 2; ++half)
                q[tile][half] =
                    push.operands[kQ] +
                    2 * (static_cast<u64>(min(first + 16 * tile + 8 * half + eighth, push.rows - 1)) *
                             push.q_row +
                         static_cast<u64>(head) * push.q_head + 4 * quad);
        const u32 steps = push.nope / kDepth;
        Weights ahead[kAhead];
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i)
            ahead[i] = read(min(i, steps - 1));
        float sums[kTiles][8][4];
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (u32 j = 0; j < 8; ++j)
#pragma unroll
                for (u32 i = 0; i < 4; ++i)
                    sums[tile][j][i] = 0;
#pragma unroll 1
        for (u32 begin = 0; begin < steps; begin += kAhead)
#pragma unroll
            for (u32 i = 0; i < kAhead; ++i) {
                const u32 step = begin + i;
                if (step >= steps)
                    break;
                uint2 a[kTiles][2];
#pragma unroll
                for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
                    for (u32 half = 0; half < 2; ++half)
                        a[tile][half] = *reinterpret_cast<const uint2*>(q[tile][half] +
                                                                        2 * step * kDepth);
                const Weights w = ahead[i];
                if (step + kAhead < steps)
                    ahead[i] = read(step + kAhead);
#pragma unroll
                for (u32 j = 0; j < 8; ++j) {
                    const u32 b0 = pair_of(w.rows[0], w.rows[1], j),
                              b1 = pair_of(w.rows[2], w.rows[3], j);
#pragma unroll
                    for (u32 tile = 0; tile < kTiles; ++tile)
                        multiply(sums[tile][j], a[tile][0].x, a[tile][1].x, a[tile][0].y,
                                 a[tile][1].y, b0, b1);
                }
            }
        // A lane has eight neighbouring columns of each of its sums.
#pragma unroll
        for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 row = first + 16 * tile + i / 2 * 8 + eighth,
                          at = column + 16 * quad + i % 2 * 8;
                if (row >= push.rows || at >= push.latent)
                    continue;
                const auto& s = sums[tile];
                *reinterpret_cast<uint4*>(push.operands[kY] +
                                          2 * (static_cast<u64>(row) * push.y_row +
                                               static_cast<u64>(head) * push.y_head + at)) =
                    make_uint4(bf16_pair(s[0][i], s[1][i]), bf16_pair(s[2][i], s[3][i]),
                               bf16_pair(s[4][i], s[5][i]), bf16_pair(s[6][i], s[7][i]));
            }
    }
    if (blockIdx.x != 0)
        return;
    // include/rotary.glsl
    const u32 fours = push.rope / 4, rows = min(push.rows - first, 16 * kTiles);
    for (u32 i = threadIdx.x; i < rows * fours; i += kThreads) {
        const u32 row = first + i / fours, four = i % fours;
        const u32 position = reinterpret_cast<const u32*>(push.operands[kPositions])[row];
        const float4 angles = reinterpret_cast<const float4*>(
            push.operands[kTable])[static_cast<u64>(position) * fours + four];
        const uint2 words = *reinterpret_cast<const uint2*>(
            push.operands[kQ] + 2 * (static_cast<u64>(row) * push.q_row +
                                     static_cast<u64>(head) * push.q_head + push.nope + 4 * four));
        const float2 x = of_pair(words.x), y = of_pair(words.y);
        const auto even = [](float2 v, float c, float s) {
            return __fsub_rn(__fmul_rn(v.x, c), __fmul_rn(v.y, s));
        };
        const auto odd = [](float2 v, float c, float s) {
            return __fadd_rn(__fmul_rn(v.x, s), __fmul_rn(v.y, c));
        };
        *reinterpret_cast<uint2*>(push.operands[kY] +
                                  2 * (static_cast<u64>(row) * push.y_row +
                                       static_cast<u64>(head) * push.y_head + push.latent + 4 * four)) =
            make_uint2(bf16_pair(even(x, angles.x, angles.y), odd(x, angles.x, angles.y)),
                       bf16_pair(even(y, angles.z, angles.w), odd(y, angles.z, angles.w)));
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(256) rows_16(const __grid_constant__ Queries push) {
    take_rows<1>(push);
}
extern "C" __global__ void __launch_bounds__(256) rows_32(const __grid_constant__ Queries push) {
    take_rows<2>(push);
}
