// SPDX-License-Identifier: MIT
// What stands between a layer's attention and its experts, for few tokens, in one dispatch: RMSNorm,
// its e4m3 codes with a scale for 128 columns (fp8_rmsnorm.comp), the router's logits, a bf16 product
// in f32, and its choice (router_forward.comp).
//
//   x        [tokens, hidden] bf16, gain [hidden] bf16 or f32, gate [experts, hidden] bf16
//   bias     [experts] f32, if has_bias; row_count [1] u32, if has_count: tokens that are there, the
//            others are neither read nor written
//   codes    [tokens, hidden] e4m3, scales [tokens, hidden / 128] f32
//   ids, weights [tokens, top_k + for_all] i32 and f32, as router_forward.comp has them
//
// Limits    rows begin at multiples of 16 bytes; hidden is a multiple of 256, at most 8192; at most
//           256 experts in 32 groups, top_k at most 64.
// Launch    512 threads; x: tokens. What takes the time is 2 * experts * hidden bytes from the second
//           cache, which each workgroup reads by its warps, four experts each at once.
#include "codes.cuh"

// Outside of the namespace, whose name in PTX depends on the folder of this file.
__shared__ __align__(16) unsigned short values[8192]; ///< the norm's, bf16
__shared__ float partial[16];                         ///< of each warp
__shared__ float scores[256];
__shared__ float group_scores[32];
__shared__ hopper::u32 keys[256];
__shared__ hopper::u32 chosen[64];

namespace {

using namespace hopper;

constexpr u32 kThreads = 512, kWarps = kThreads / 32;
constexpr u32 kMostHidden = 8192;
constexpr u32 kFours = kMostHidden / (4 * kThreads); // of a thread
constexpr u32 kAtOnce = 4;                           // experts of a warp

struct Route {
    const u64* operands;
    u32 hidden, experts, top_k, for_all;
    u32 x_ld, gate_ld, codes_ld, scales_ld;
    u32 has_bias, has_count, gain_f32, powers;
    u32 softmax, normalise, groups, group_top_k, group_score_top;
    float eps, route_scale;
};
enum Operand { kX, kGain, kGate, kBias, kRowCount, kCodes, kScales, kIds, kWeights };

/// The same in all threads. Everyone calls it.
template <class Combine>
__device__ __forceinline__ float over_all(float x, Combine combine) {
#pragma unroll
    for (u32 d = 16; d != 0; d /= 2)
        x = combine(x, __shfl_xor_sync(~0u, x, d));
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        partial[threadIdx.x / 32] = x;
    __syncthreads();
    float all = partial[0];
#pragma unroll
    for (u32 w = 1; w < kWarps; ++w)
        all = combine(all, partial[w]);
    return all;
}

__device__ __forceinline__ float sum_of_all(float x) {
    return over_all(x, [](float a, float b) { return a + b; });
}

__device__ __forceinline__ float4 gain_at(const Route& push, u32 column) {
    const u64 gain = push.operands[kGain];
    if (push.gain_f32 != 0)
        return *reinterpret_cast<const float4*>(gain + 4 * column);
    const uint2 words = *reinterpret_cast<const uint2*>(gain + 2 * column);
    const float2 low = of_pair(words.x), high = of_pair(words.y);
    return make_float4(low.x, low.y, high.x, high.y);
}

/// The norm of the token to codes, and in bf16 to `values`.
__device__ __forceinline__ void normalise(const Route& push, u32 token) {
    const u64 x = push.operands[kX] + 2 * static_cast<u64>(token) * push.x_ld;
    uint2 read[kFours];
    float squares = 0;
#pragma unroll
    for (u32 i = 0; i < kFours; ++i) {
        const u32 column = 4 * (i * kThreads + threadIdx.x);
        read[i] = column < push.hidden ? *reinterpret_cast<const uint2*>(x + 2 * column)
                                       : make_uint2(0, 0);
        const float2 low = of_pair(read[i].x), high = of_pair(read[i].y);
        squares += low.x * low.x + low.y * low.y + high.x * high.x + high.y * high.y;
    }
    const float inverse_rms =
        1.0f / sqrtf(sum_of_all(squares) / static_cast<float>(push.hidden) + push.eps);
#pragma unroll
    for (u32 i = 0; i < kFours; ++i) {
        const u32 column = 4 * (i * kThreads + threadIdx.x);
        if (column >= push.hidden) // a warp has whole blocks
            break;
        const float2 low = of_pair(read[i].x), high = of_pair(read[i].y);
        const float4 gain = gain_at(push, column);
        const float y[4] = {low.x * inverse_rms * gain.x, low.y * inverse_rms * gain.y,
                            high.x * inverse_rms * gain.z, high.y * inverse_rms * gain.w};
        *reinterpret_cast<uint2*>(values + column) =
            make_uint2(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]));
        const Block block = code_block(y, push.powers != 0);
        *reinterpret_cast<u32*>(push.operands[kCodes] + static_cast<u64>(token) * push.codes_ld +
                                column) = block.codes;
        if (threadIdx.x % 32 == 0)
            reinterpret_cast<float*>(
                push.operands[kScales])[static_cast<u64>(token) * push.scales_ld + column / 128] = block.scale;
    }
    __syncthreads();
}

/// Logits to `scores`.
__device__ __forceinline__ void multiply(const Route& push) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (u32 first = warp * kAtOnce; first < push.experts; first += kWarps * kAtOnce) {
        u64 rows[kAtOnce];
        float sums[kAtOnce];
#pragma unroll
        for (u32 e = 0; e < kAtOnce; ++e) {
            rows[e] = push.operands[kGate] +
                      2 * static_cast<u64>(min(first + e, push.experts - 1)) * push.gate_ld;
            sums[e] = 0;
        }
#pragma unroll 4
        for (u32 column = 8 * lane; column < push.hidden; column += 256) {
            uint4 weights[kAtOnce];
#pragma unroll
            for (u32 e = 0; e < kAtOnce; ++e)
                weights[e] = __ldg(reinterpret_cast<const uint4*>(rows[e] + 2 * column));
            const uint4 x = *reinterpret_cast<const uint4*>(values + column);
            const u32 of_x[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (u32 e = 0; e < kAtOnce; ++e) {
                const u32 of_w[4] = {weights[e].x, weights[e].y, weights[e].z, weights[e].w};
#pragma unroll
                for (u32 i = 0; i < 4; ++i) {
                    const float2 a = of_pair(of_x[i]), b = of_pair(of_w[i]);
                    sums[e] = fmaf(a.x, b.x, sums[e]);
                    sums[e] = fmaf(a.y, b.y, sums[e]);
                }
            }
        }
#pragma unroll
        for (u32 e = 0; e < kAtOnce; ++e) {
#pragma unroll
            for (u32 d = 16; d != 0; d /= 2)
                sums[e] += __shfl_xor_sync(~0u, sums[e], d);
            if (lane == e && first + e < push.experts)
                scores[first + e] = sums[e];
        }
    }
    __syncthreads();
}

/// Above every NaN stands every number.
__device__ __forceinline__ float selection_score(const Route& push, u32 expert) {
    float score = scores[expert];
    if (push.has_bias != 0)
        score += reinterpret_cast<const float*>(push.operands[kBias])[expert];
    return isnan(score) ? __uint_as_float(0xff800000u) : score;
}

/// A number that is larger where the score is, never 0; equal scores have equal numbers.
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = score == 0 ? 0 : __float_as_uint(score);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// Of one of `count`: how many stand before it.
template <class Before>
__device__ __forceinline__ u32 rank_among(u32 count, Before before) {
    u32 rank = 0;
#pragma unroll 4
    for (u32 i = 0; i < count; ++i)
        rank += before(i) ? 1 : 0;
    return rank;
}

__device__ __forceinline__ void choose(const Route& push, u32 token) {
    const u32 e = threadIdx.x;
    const bool own = e < push.experts;
    const float logit = own ? scores[e] : __uint_as_float(0xff800000u);
    float score = 0;
    if (push.softmax != 0) {
        const float most = over_all(logit, [](float a, float b) { return fmaxf(a, b); });
        const float power = own ? expf(logit - most) : 0;
        score = power / sum_of_all(power);
    } else {
        score = 1.0f / (1.0f + expf(-logit));
    }
    if (own)
        scores[e] = score;
    __syncthreads();
    u32 size = push.experts;
    if (push.groups > 1) {
        size = push.experts / push.groups;
        if (e < push.groups) {
            float first = __uint_as_float(0xff800000u), second = first;
            for (u32 i = e * size; i < (e + 1) * size; ++i) {
                const float s = selection_score(push, i);
                second = s > first ? first : fmaxf(second, s);
                first = fmaxf(first, s);
            }
            group_scores[e] = push.group_score_top > 1 && size > 1 ? first + second : first;
        }
        __syncthreads();
    }
    if (own) {
        const u32 group = e / size;
        const bool open = push.groups <= 1 || rank_among(push.groups, [&](u32 g) {
                              return group_scores[g] > group_scores[group] ||
                                     (group_scores[g] == group_scores[group] && g < group);
                          }) < push.group_top_k;
        keys[e] = open ? key_of(selection_score(push, e)) : 0;
    }
    __syncthreads();
    int* const ids = reinterpret_cast<int*>(push.operands[kIds]) +
                     static_cast<u64>(token) * (push.top_k + push.for_all);
    float* const weights = reinterpret_cast<float*>(push.operands[kWeights]) +
                           static_cast<u64>(token) * (push.top_k + push.for_all);
    if (own && keys[e] != 0) {
        const u32 key = keys[e];
        const u32 rank = rank_among(push.experts, [&](u32 i) {
            return keys[i] > key || (keys[i] == key && i < e);
        });
        if (rank < push.top_k) {
            chosen[rank] = e;
            ids[rank] = static_cast<int>(e);
        }
    }
    __syncthreads();
    if (e < push.top_k) {
        float sum = 0;
        for (u32 k = 0; k < push.top_k && push.normalise != 0; ++k)
            sum += scores[chosen[k]];
        const float factor =
            push.normalise != 0 ? push.route_scale / (sum + 1e-20f) : push.route_scale;
        weights[e] = scores[chosen[e]] * factor;
    } else if (e < push.top_k + push.for_all) {
        ids[e] = static_cast<int>(push.experts + e - push.top_k);
        weights[e] = 1;
    }
}

} // namespace

extern "C" __global__ void __launch_bounds__(512, 1) route(const __grid_constant__ Route push) {
    const u32 token = blockIdx.x;
    if (push.has_count != 0 && token >= *reinterpret_cast<const u32*>(push.operands[kRowCount]))
        return;
    normalise(push, token);
    multiply(push);
    choose(push, token);
}
