// SPDX-License-Identifier: MIT
// What stands between attention over latents and the projection of its results, for few rows, in one
// dispatch: the parts of a row as one (paged_attention_combine.comp), a head's values, a bf16 product
// in f32, and their e4m3 codes (fp8_quantize_rows.comp): a head's 128 values share a scale.
//
//   parts     [rows, 2] u32: the first partial of a row and how many there are
//   partial   [partials, heads, latent] f32, partial_lse [partials, heads] f32, base 2
//   sums      [rows, heads, latent] bf16: of rows that have one part
//   weights   [heads, 128, latent] bf16
//   codes     [rows, heads * 128] e4m3, scales [rows, heads] f32
// What is combined and what is multiplied are rounded to bf16, as where they are stored.
//
// Limits    rows begin at multiples of 16 bytes; latent is a multiple of 128, at most 512.
// Launch    256 threads; x: 8 * TILES rows, y: heads. TILES is 1, 2 or 4: entries rows_8, rows_16 and
//           rows_32. A warp has 16 of the head's values, whose weights it reads as its units take
//           them: the order of k within 64 is another, for weights and sums alike.
#include "codes.cuh"

/// Outside of the namespace, whose name in PTX depends on the folder of this file.
extern __shared__ __align__(16) unsigned char dynamic[];

namespace {

using namespace hopper;

constexpr u32 kWarps = 8, kMostLatent = 512, kValues = 128;
constexpr u32 kWindow = 64;                  // of k: each lane of four has 16
constexpr u32 kAhead = 4;                    // windows whose weights are read before sums are there
constexpr u32 kPitch = kMostLatent + 8;      // of a row of sums, which spreads rows over the banks
constexpr u32 kValuePitch = kValues + 4;

struct Values {
    const u64* operands;
    u32 rows, heads, latent;
    u32 sums_row, sums_head, weights_row, weights_head; ///< strides in elements
    u32 codes_ld, scales_ld, powers;
};
enum Operand { kParts, kPartial, kPartialLse, kSums, kWeights, kCodes, kScales };

template <u32 kTiles>
union Memory {
    __align__(16) unsigned short sums[8 * kTiles][kPitch];
    __align__(16) float values[8 * kTiles][kValuePitch];
};

__device__ __forceinline__ float over_warp_max(float x) {
#pragma unroll
    for (u32 d = 16; d != 0; d /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
    return x;
}
__device__ __forceinline__ float over_warp_sum(float x) {
#pragma unroll
    for (u32 d = 16; d != 0; d /= 2)
        x += __shfl_xor_sync(~0u, x, d);
    return x;
}

/// A warp puts a row's parts together.
__device__ __forceinline__ void combine(const Values& push, u32 row, u32 head, unsigned short* to) {
    constexpr u32 kFours = kMostLatent / 128;
    const u32 lane = threadIdx.x % 32;
    uint2 parts = make_uint2(0, 0);
    if (row < push.rows)
        parts = *reinterpret_cast<const uint2*>(push.operands[kParts] + 8 * static_cast<u64>(row));
    const u32 first = parts.x, count = parts.y;
    if (count == 1) {
        const u64 from = push.operands[kSums] + 2 * (static_cast<u64>(row) * push.sums_row +
                                                     static_cast<u64>(head) * push.sums_head);
        for (u32 c = 4 * lane; c < push.latent; c += 128)
            *reinterpret_cast<uint2*>(to + c) = *reinterpret_cast<const uint2*>(from + 2 * c);
        return;
    }
    const float* const logs = reinterpret_cast<const float*>(push.operands[kPartialLse]);
    const auto log_of = [&](u32 i) { return logs[static_cast<u64>(first + i) * push.heads + head]; };
    float top = __uint_as_float(0xff800000u);
    for (u32 i = lane; i < count; i += 32)
        top = fmaxf(top, log_of(i));
    top = over_warp_max(top);
    float total = 0;
    for (u32 i = lane; i < count; i += 32)
        total += exp2f(log_of(i) - top);
    total = over_warp_sum(total);
    float4 sums[kFours];
#pragma unroll
    for (u32 j = 0; j < kFours; ++j)
        sums[j] = make_float4(0, 0, 0, 0);
#pragma unroll 4
    for (u32 i = 0; i < count; ++i) {
        const float power = exp2f(log_of(i) - top);
        const float4* const from = reinterpret_cast<const float4*>(
            push.operands[kPartial] +
            4 * (static_cast<u64>(first + i) * push.heads + head) * push.latent);
#pragma unroll
        for (u32 j = 0; j < kFours; ++j)
            if (128 * j < push.latent) {
                const float4 x = __ldcs(from + lane + 32 * j);
                sums[j].x = fmaf(x.x, power, sums[j].x);
                sums[j].y = fmaf(x.y, power, sums[j].y);
                sums[j].z = fmaf(x.z, power, sums[j].z);
                sums[j].w = fmaf(x.w, power, sums[j].w);
            }
    }
    const float inverse = count != 0 ? 1.0f / total : 0;
#pragma unroll
    for (u32 j = 0; j < kFours; ++j)
        if (128 * j < push.latent)
            *reinterpret_cast<uint2*>(to + 4 * lane + 128 * j) =
                make_uint2(bf16_pair(sums[j].x * inverse, sums[j].y * inverse),
                           bf16_pair(sums[j].z * inverse, sums[j].w * inverse));
}

__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Of two rows of weights, eight apart: 16 of k each.
struct Weights {
    uint4 low[2], high[2];
};

template <u32 kTiles>
__device__ __forceinline__ void multiply_window(float (&sums)[kTiles][4], const Weights& w,
                                                const Memory<kTiles>& memory, u32 at) {
    const u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const uint4 x =
                *reinterpret_cast<const uint4*>(&memory.sums[8 * tile + lane / 4][at + 8 * half]);
            multiply(sums[tile], w.low[half].x, w.high[half].x, w.low[half].y, w.high[half].y, x.x, x.y);
            multiply(sums[tile], w.low[half].z, w.high[half].z, w.low[half].w, w.high[half].w, x.z, x.w);
        }
}

template <u32 kTiles>
__device__ __forceinline__ void take_rows(const Values& push) {
    Memory<kTiles>& memory = *reinterpret_cast<Memory<kTiles>*>(dynamic);
    static_assert(sizeof(memory) <= 33280, "manifest.json has these bytes");
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
    const u32 first = blockIdx.x * 8 * kTiles, head = blockIdx.y;
    const u64 weights =
        push.operands[kWeights] +
        2 * (static_cast<u64>(head) * push.weights_head +
             static_cast<u64>(16 * warp + lane / 4) * push.weights_row + 16 * quad);
    const u64 eight_rows = 16 * static_cast<u64>(push.weights_row);
    const auto read = [&](u32 window) {
        Weights w;
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
            const u64 from = weights + 2 * (window * kWindow + 8 * half);
            w.low[half] = __ldg(reinterpret_cast<const uint4*>(from));
            w.high[half] = __ldg(reinterpret_cast<const uint4*>(from + eight_rows));
        }
        return w;
    };
    const u32 windows = push.latent / kWindow;
    Weights ahead[kAhead];
#pragma unroll
    for (u32 i = 0; i < kAhead; ++i)
        ahead[i] = read(min(i, windows - 1));
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i)
        combine(push, first + warp * kTiles + i, head, memory.sums[warp * kTiles + i]);
    __syncthreads();
    float sums[kTiles][4];
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            sums[i][j] = 0;
#pragma unroll 1
    for (u32 begin = 0; begin < windows; begin += kAhead)
#pragma unroll
        for (u32 i = 0; i < kAhead; ++i) {
            const u32 window = begin + i;
            if (window >= windows)
                break;
            const Weights w = ahead[i];
            if (window + kAhead < windows)
                ahead[i] = read(window + kAhead);
            multiply_window<kTiles>(sums, w, memory, window * kWindow + 16 * quad);
        }
    __syncthreads(); // values stand where sums did
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i)
#pragma unroll
        for (u32 j = 0; j < 4; ++j)
            memory.values[8 * i + 2 * quad + j % 2][16 * warp + lane / 4 + j / 2 * 8] = sums[i][j];
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kTiles; ++i) {
        const u32 row = first + warp * kTiles + i;
        if (row >= push.rows)
            break;
        const float4 v = *reinterpret_cast<const float4*>(&memory.values[warp * kTiles + i][4 * lane]);
        const float2 low = of_pair(bf16_pair(v.x, v.y)), high = of_pair(bf16_pair(v.z, v.w));
        const float y[4] = {low.x, low.y, high.x, high.y};
        const Block block = code_block(y, push.powers != 0);
        *reinterpret_cast<u32*>(push.operands[kCodes] + static_cast<u64>(row) * push.codes_ld +
                                head * kValues + 4 * lane) = block.codes;
        if (lane == 0)
            reinterpret_cast<float*>(push.operands[kScales])[static_cast<u64>(row) * push.scales_ld +
                                                              head] = block.scale;
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps) rows_8(const __grid_constant__ Values push) {
    take_rows<1>(push);
}
extern "C" __global__ void __launch_bounds__(32 * kWarps) rows_16(const __grid_constant__ Values push) {
    take_rows<2>(push);
}
extern "C" __global__ void __launch_bounds__(32 * kWarps) rows_32(const __grid_constant__ Values push) {
    take_rows<4>(push);
}
