// SPDX-License-Identifier: MIT
// Products of e4m3 codes with scales for few rows on Hopper's warpgroup units: what gemm_fp8.cu
// computes as nt, bit for bit, where reading the weights takes longer than multiplying them. Rows of
// weights are the units' 64 rows, and rows of A their columns, of which they take any eight.
//
//   D = A * transpose(B) (+ D), A [m, k], B [n, k]
//
// Limits    codes and d begin at multiples of 16 bytes; the codes' leading dimensions and strides
//           are multiples of 16, those of d and n multiples of 8 elements.
// Launch    128 threads; x: turns of 64 rows, y: 64 columns of D each. A ring of stages is filled by
//           all threads' copies of 16 bytes.
#include "few.cuh"

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(1024) unsigned char memory[];

namespace {

using namespace hopper;

constexpr u32 kDepth = 128;                // of k in a stage
constexpr u32 kSlotScales = kMostRows + 8; // words of a stage: of rows, then B's

// In shared memory, in front of the stages: scales.
constexpr u32 kStagesAt = (kMostStages * kSlotScales * 4 + 1023) / 1024 * 1024;

/// Operands of one turn: 64 columns of D and up to 64 rows.
struct Turn {
    u64 weights;            ///< codes of the first column's row of B
    u32 ldb, columns;       ///< that B has from there on
    const float* b_scales;  ///< of the first block of k
    u32 b_scale_block;
    u64 a;
    u32 lda;
    const float* a_scales;
    u32 ld_a_scales;
    u32 k, rows;            ///< rows of this turn
    u64 d;
    u32 ldd, column;
    bool f32, accumulate;
};

/// This thread's copies of a stage's weights.
__device__ __forceinline__ void copy_weights(const Team& team, const Turn& turn, u32 stage, u32 block) {
    const u32 chunk = team.thread % 8, row = team.thread / 8;
    const u32 at = block * kDepth + chunk * 16;
    const u32 there = at >= turn.k ? 0 : min(turn.k - at, 16);
    const u32 to = stage + row * kDepth + ((chunk ^ row % 8) << 4);
#pragma unroll
    for (u32 j = 0; j < kColumns / 16; ++j) {
        const u32 r = min(row + 16 * j, turn.columns - 1);
        copy_16(to + j * 16 * kDepth, turn.weights + static_cast<u64>(r) * turn.ldb + (there ? at : 0),
                   there);
    }
}

/// This thread's rows of a turn: kRows / 16 of them, and the one whose scales it copies.
template <u32 kRows>
struct OwnRows {
    u64 codes[(kRows + 15) / 16];
    const float* scales;
};

template <u32 kRows>
__device__ __forceinline__ void copy_rows(const Team& team, const Turn& turn, const OwnRows<kRows>& own, u32 stage,
                                          u32 scales, u32 block) {
    const u32 chunk = team.thread % 8, row = team.thread / 8;
    const u32 at = block * kDepth + chunk * 16;
    const u32 there = at >= turn.k ? 0 : min(turn.k - at, 16);
    const u32 to = stage + row * kDepth + ((chunk ^ row % 8) << 4);
#pragma unroll
    for (u32 j = 0; j < (kRows + 15) / 16; ++j)
        if (row + 16 * j < turn.rows)
            copy_16(to + j * 16 * kDepth, own.codes[j] + (there ? at : 0), there);
    if (team.thread < turn.rows)
        copy_word(scales + 4 * team.thread, own.scales + block);
    if (team.thread == kThreads - 1)
        copy_word(scales + 4 * kMostRows,
                  turn.b_scales + static_cast<u64>(block) * turn.b_scale_block);
}

/// The sums of a turn: kRows of A at most. kBytes: of the ring. places.d_row(r): the row of D, a_row(r): of A.
template <u32 kRows, u32 kBytes, class Places>
__device__ __forceinline__ void take_turn(const Team& team, const Turn& turn, const Places& places) {
    constexpr u32 kStages = kStagesOf<kRows, kBytes>, kPasses = (kRows + 15) / 16;
    const u32 base = shared_address(team.memory), ring = base + kStagesAt;
    const u32 quad = team.thread % 4;
    const u32 blocks = (turn.k + kDepth - 1) / kDepth;
    OwnRows<kRows> own;
#pragma unroll
    for (u32 j = 0; j < kPasses; ++j) {
        const u32 r = team.thread / 8 + 16 * j;
        own.codes[j] = turn.a + (r < turn.rows ? static_cast<u64>(places.a_row(r)) * turn.lda : 0);
    }
    own.scales = turn.a_scales + (team.thread < turn.rows ? static_cast<u64>(places.a_row(team.thread)) *
                                                                turn.ld_a_scales
                                                          : 0);
    const auto weights_at = [&](u32 stage) { return ring + stage * kWeightBytes; };
    const auto rows_at = [&](u32 stage) {
        return ring + kStages * kWeightBytes + stage * kRows * kDepth;
    };
    const auto scales_at = [&](u32 stage) { return base + stage * kSlotScales * 4; };
#pragma unroll 1
    for (u32 i = 0; i < kStages - 1; ++i) {
        if (i < blocks) {
            copy_weights(team, turn, weights_at(i), i);
            copy_rows<kRows>(team, turn, own, rows_at(i), scales_at(i), i);
        }
        commit_copies();
    }
    const Results to = {turn.d, turn.ldd, turn.column, turn.columns, turn.rows, 1, turn.f32,
                        turn.accumulate};
    Before<kRows> before;
    read_before<kRows>(team, to, places, before); // while copies are under way
    float sums[kRows / 2], part[kRows / 2];
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
        for (u32 k = 0; k < kDepth / 32; ++k)
            multiply_few(part, descriptor(weights_at(stage) + k * 32, 16, 1024),
                         descriptor(rows_at(stage) + k * 32, 16, 1024), k != 0);
        commit_products();
        if (i + kStages - 1 < blocks) {
            copy_weights(team, turn, weights_at(next), i + kStages - 1);
            copy_rows<kRows>(team, turn, own, rows_at(next), scales_at(next), i + kStages - 1);
        }
        commit_copies();
        float2 scale[kRows / 8];
        const float of_b = read_shared(scales_at(stage) + 4 * kMostRows);
#pragma unroll
        for (u32 j = 0; j < kRows / 8; ++j) {
            const float2 of_a = read_shared2(scales_at(stage) + 4 * (8 * j + 2 * quad));
            scale[j] = make_float2(of_a.x * of_b, of_a.y * of_b);
        }
        wait_for_products<0>();
#pragma unroll
        for (u32 j = 0; j < kRows / 8; ++j)
            add_scaled(sums, part, 4 * j, scale[j]);
        stage = stage + 1 == kStages ? 0 : stage + 1;
        next = next + 1 == kStages ? 0 : next + 1;
    }
    wait_for_groups<0>();
    team.sync();
    store_turned<kRows>(team, to, places, before, sums, reinterpret_cast<float*>(team.memory + kStagesAt));
    team.sync(); // before the next turn takes the memory
}

template <u32 kBytes, class Places>
__device__ __forceinline__ void take_turn(const Team& team, const Turn& turn, const Places& places) {
#define BELLOWS_TAKE_TURN(rows) take_turn<rows, kBytes>(team, turn, places)
    BELLOWS_WITH_ROWS(turn.rows, BELLOWS_TAKE_TURN);
}

__device__ __forceinline__ const float* floats(u64 address, u64 offset) {
    return reinterpret_cast<const float*>(address) + offset;
}

struct Dense {
    const u64* operands; ///< a, a_scales, b, b_scales, d
    u32 m, n, k, lda, ldb, ldd;
    u32 ld_a_scales, b_scale_rows, b_scale_block; ///< as gemm_fp8.cu has them
    u32 f32, accumulate;
};

struct DensePlaces {
    u32 first;
    __device__ u32 a_row(u32 r) const { return first + r; }
    __device__ u32 d_row(u32 r) const { return first + r; }
};

constexpr u32 kRingBytes = 108 * 1024;

} // namespace

extern "C" __global__ void __launch_bounds__(128, 2) dense(const __grid_constant__ Dense push) {
    const u32 column = blockIdx.y * kColumns, first = blockIdx.x * kMostRows;
    const u64* const o = push.operands;
    const Turn turn = {o[2] + static_cast<u64>(column) * push.ldb,
                       push.ldb,
                       push.n - column,
                       floats(o[3], static_cast<u64>(column / 128) * push.b_scale_rows),
                       push.b_scale_block,
                       o[0],
                       push.lda,
                       floats(o[1], 0),
                       push.ld_a_scales,
                       push.k,
                       min(push.m - first, kMostRows),
                       o[4],
                       push.ldd,
                       column,
                       push.f32 != 0,
                       push.accumulate != 0};
    take_turn<kRingBytes>(Team{threadIdx.x, 0, memory}, turn, DensePlaces{first});
}
