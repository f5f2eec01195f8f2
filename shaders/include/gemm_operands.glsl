// SPDX-License-Identifier: MIT
// Loads and stores of GEMM operands. The variant defines A_BF16, B_BF16, D_BF16 as 0 or 1. Indices
// count elements from the start of one matrix. The *4 forms move four consecutive elements in one
// access and need an index that is a multiple of 4 and a base aligned to four elements.
#ifndef BELLOWS_GEMM_OPERANDS_GLSL
#define BELLOWS_GEMM_OPERANDS_GLSL

#include "storage.glsl"

#if A_BF16
#define A_ELEMENT uint
#define A_LOG2_BYTES 1u
vec4 load_a4(uvec2 base, uint index) {
    return bf16_unpack(ReadUvec2(base).v[index >> 2]);
}
float load_a(uvec2 base, uint index) {
    return bf16_load(base, index);
}
#else
#define A_ELEMENT float
#define A_LOG2_BYTES 2u
vec4 load_a4(uvec2 base, uint index) {
    return ReadVec4(base).v[index >> 2];
}
float load_a(uvec2 base, uint index) {
    return ReadFloat(base).v[index];
}
#endif

#if B_BF16
#define B_ELEMENT uint
#define B_LOG2_BYTES 1u
vec4 load_b4(uvec2 base, uint index) {
    return bf16_unpack(ReadUvec2(base).v[index >> 2]);
}
float load_b(uvec2 base, uint index) {
    return bf16_load(base, index);
}
#else
#define B_ELEMENT float
#define B_LOG2_BYTES 2u
vec4 load_b4(uvec2 base, uint index) {
    return ReadVec4(base).v[index >> 2];
}
float load_b(uvec2 base, uint index) {
    return ReadFloat(base).v[index];
}
#endif

// One element of D = alpha * sum (+ D). Every path and tile rounds alike.
float gemm_result(float sum, float old, float alpha, bool accumulate) {
    return accumulate ? fma(alpha, sum, old) : alpha * sum;
}

#if D_BF16
#define D_ELEMENT uint
#define D_LOG2_BYTES 1u
vec4 load_d4(uvec2 base, uint index) {
    return bf16_unpack(WriteUvec2(base).v[index >> 2]);
}
// The first `count` (1..4) of four elements, then zeros; index is even.
vec4 load_d_part(uvec2 base, uint index, uint count) {
    uint low = WriteUint(base).v[index >> 1];
    uint high = count > 2u ? WriteUint(base).v[(index >> 1) + 1u] : 0u;
    return bf16_unpack(uvec2(low, high));
}
void store_d4(uvec2 base, uint index, vec4 sum, float alpha, bool accumulate) {
    vec4 old = accumulate ? load_d4(base, index) : vec4(0);
    [[unroll]] for (int c = 0; c < 4; ++c) {
        sum[c] = gemm_result(sum[c], old[c], alpha, accumulate);
    }
    WriteUvec2(base).v[index >> 2] = bf16_pack(sum);
}
// The same onto `old`, what D holds there, of no meaning unless accumulating. A copy: store_d4 by way
// of it took gemm_direct_nt's sums out of registers on NVIDIA.
void store_d4_on(uvec2 base, uint index, vec4 sum, vec4 old, float alpha, bool accumulate) {
    [[unroll]] for (int c = 0; c < 4; ++c) {
        sum[c] = gemm_result(sum[c], old[c], alpha, accumulate);
    }
    WriteUvec2(base).v[index >> 2] = bf16_pack(sum);
}
// Elements index and index + 1 (index even); the second only if `both`, else it is left as it was.
void store_d_pair(uvec2 base, uint index, float sum0, float sum1, bool both, float alpha,
                  bool accumulate) {
    uint old = WriteUint(base).v[index >> 1];
    uint low = bf16_code(gemm_result(sum0, bf16_low(old), alpha, accumulate));
    uint high = bf16_code(gemm_result(sum1, bf16_high(old), alpha, accumulate)) << 16;
    WriteUint(base).v[index >> 1] = low | (both ? high : old & 0xFFFF0000u);
}
// The first `count` (1..4) of four elements; index is even.
void store_d_part(uvec2 base, uint index, vec4 sum, uint count, float alpha, bool accumulate) {
    store_d_pair(base, index, sum.x, sum.y, count > 1u, alpha, accumulate);
    if (count > 2u) {
        store_d_pair(base, index + 2u, sum.z, sum.w, count > 3u, alpha, accumulate);
    }
}
#else
#define D_ELEMENT float
#define D_LOG2_BYTES 2u
vec4 load_d4(uvec2 base, uint index) {
    return WriteVec4(base).v[index >> 2];
}
// The first `count` (1..4) of four elements, then zeros.
vec4 load_d_part(uvec2 base, uint index, uint count) {
    vec4 old = vec4(0);
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
        if (c < count) {
            old[c] = WriteFloat(base).v[index + c];
        }
    }
    return old;
}
void store_d4(uvec2 base, uint index, vec4 sum, float alpha, bool accumulate) {
    vec4 old = accumulate ? load_d4(base, index) : vec4(0);
    [[unroll]] for (int c = 0; c < 4; ++c) {
        sum[c] = gemm_result(sum[c], old[c], alpha, accumulate);
    }
    WriteVec4(base).v[index >> 2] = sum;
}
void store_d4_on(uvec2 base, uint index, vec4 sum, vec4 old, float alpha, bool accumulate) {
    [[unroll]] for (int c = 0; c < 4; ++c) {
        sum[c] = gemm_result(sum[c], old[c], alpha, accumulate);
    }
    WriteVec4(base).v[index >> 2] = sum;
}
// The first `count` (1..4) of four elements.
void store_d_part(uvec2 base, uint index, vec4 sum, uint count, float alpha, bool accumulate) {
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
        if (c < count) {
            float old = accumulate ? WriteFloat(base).v[index + c] : 0.0;
            WriteFloat(base).v[index + c] = gemm_result(sum[c], old, alpha, accumulate);
        }
    }
}
#endif

#endif
