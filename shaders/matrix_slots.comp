// SPDX-License-Identifier: MIT
// Which elements of matrices the invocations of a subgroup hold, and whether matrices keep those that
// are set one by one: engine/matrix_images.cpp. One subgroup.
//
// restore 0: numbers[use][invocation][8] says which elements an invocation holds: of A and B row (or
//         column) * mma_k + k, of their product row * mma_n + column. Nothing is stored when an
//         invocation holds another number of elements than an equal share of eight at most.
// restore 1: numbers are bits of elements instead, of which A and B are made; d = A * B by rows.
// Variants   the element of A and B
// Dispatch   one workgroup. Shared: A and B, or their product.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif
#include "include/common.glsl"

#include "matrix_slots.kernel.glsl"

layout(local_size_x_id = 0) in;

#define A_UNITS (mma_m * mma_k / 8u)
#define B_UNITS (mma_n * mma_k / 8u)
#define D_UNITS (mma_m * mma_n / 4u)
#define A_SHARE (mma_m * mma_k / local_size)
#define B_SHARE (mma_n * mma_k / local_size)
#define D_SHARE (mma_m * mma_n / local_size)
shared uvec4 staged[A_UNITS + B_UNITS > D_UNITS ? A_UNITS + B_UNITS : D_UNITS];

uint at(uint use, uint e) {
    return (use * local_size + gl_SubgroupInvocationID) * 8u + e;
}
#if MATRIX_BF16
#define MATRIX_TYPE bfloat16_t
// Two whole numbers up to 256 in a word.
uint pair_of(uint first, uint second) {
    return floatBitsToUint(float(first)) >> 16 | floatBitsToUint(float(second));
}
bfloat16_t restored(uint bits) {
    return uintBitsToBFloat16EXT(unpack16(bits)).x;
}
#else
#define MATRIX_TYPE float16_t
uint pair_of(uint first, uint second) {
    return packHalf2x16(vec2(first, second));
}
float16_t restored(uint bits) {
    return unpackFloat2x16(bits).x;
}
#endif

void main() {
    uint lane = gl_SubgroupInvocationID;
    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a;
    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
    coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator> d =
        coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>(0.0);
    if (a.length() != A_SHARE || b.length() != B_SHARE || d.length() != D_SHARE) {
        return;
    }
    if (restore == 0u) {
        for (uint i = lane; i < A_UNITS + B_UNITS; i += local_size) {
            uint first = 8u * (i < A_UNITS ? i : i - A_UNITS);
            [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                staged[i][q] = pair_of(first + 2u * q, first + 2u * q + 1u);
            }
        }
        barrier();
        coopMatLoad(a, staged, 0u, mma_k / 8u, gl_CooperativeMatrixLayoutRowMajor);
        coopMatLoad(b, staged, A_UNITS, mma_k / 8u, gl_CooperativeMatrixLayoutColumnMajor);
        barrier();
        for (uint i = lane; i < D_UNITS; i += local_size) {
            vec4 four = vec4(4u * i, 4u * i + 1u, 4u * i + 2u, 4u * i + 3u);
            staged[i] = floatBitsToUint(four);
        }
        barrier();
        coopMatLoad(d, staged, 0u, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        [[unroll]] for (uint e = 0u; e < A_SHARE; ++e) {
            push.operands.numbers.v[at(0u, e)] = uint(float(a[e]));
        }
        [[unroll]] for (uint e = 0u; e < B_SHARE; ++e) {
            push.operands.numbers.v[at(1u, e)] = uint(float(b[e]));
        }
        [[unroll]] for (uint e = 0u; e < D_SHARE; ++e) {
            push.operands.numbers.v[at(2u, e)] = uint(d[e]);
        }
        return;
    }
    [[unroll]] for (uint e = 0u; e < A_SHARE; ++e) {
        a[e] = restored(push.operands.numbers.v[at(0u, e)]);
    }
    [[unroll]] for (uint e = 0u; e < B_SHARE; ++e) {
        b[e] = restored(push.operands.numbers.v[at(1u, e)]);
    }
    d = coopMatMulAdd(a, b, d);
    coopMatStore(d, staged, 0u, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
    barrier();
    for (uint i = lane; i < D_UNITS; i += local_size) {
        push.operands.d.v[i] = staged[i];
    }
}
