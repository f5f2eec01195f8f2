// SPDX-License-Identifier: MIT
// Whether matrices keep their elements when invocations save and restore them one by one:
// engine/matrix_images.cpp. One subgroup.
//
// restore 0: loads A (mma_m x mma_k, f16, by rows) and B (mma_k x mma_n, f16, by columns) and saves
//         what each invocation holds. restore 1: another pipeline restores them and stores A * B
//         (f32, by rows). Nothing is stored when an invocation holds another number of elements
//         than an equal share.
// a, b    uvec4[.., mma_k / 8]; image uvec4[A's, then B's elements / 8][subgroup]; d uvec4[.., mma_n / 4]
// Dispatch one workgroup. Shared: A, B or D.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#include "include/common.glsl"

#include "matrix_image.kernel.glsl"

layout(local_size_x_id = 0) in;

#define A_UNITS (mma_m * mma_k / 8u)
#define B_UNITS (mma_n * mma_k / 8u)
#define D_UNITS (mma_m * mma_n / 4u)
#define A_SHARE (A_UNITS / local_size)
#define B_SHARE (B_UNITS / local_size)
shared uvec4 staged[A_UNITS + B_UNITS > D_UNITS ? A_UNITS + B_UNITS : D_UNITS];

void main() {
    uint lane = gl_SubgroupInvocationID;
    coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a;
    coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
    if (a.length() != A_SHARE * 8u || b.length() != B_SHARE * 8u) {
        return;
    }
    if (restore == 0u) {
        for (uint i = lane; i < A_UNITS; i += local_size) {
            staged[i] = push.operands.a.v[i];
        }
        for (uint i = lane; i < B_UNITS; i += local_size) {
            staged[A_UNITS + i] = push.operands.b.v[i];
        }
        barrier();
        coopMatLoad(a, staged, 0u, mma_k / 8u, gl_CooperativeMatrixLayoutRowMajor);
        coopMatLoad(b, staged, A_UNITS, mma_k / 8u, gl_CooperativeMatrixLayoutColumnMajor);
        [[unroll]] for (uint u = 0u; u < A_SHARE; ++u) {
            uvec4 part;
            [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                part[q] = packFloat2x16(f16vec2(a[8u * u + 2u * q], a[8u * u + 2u * q + 1u]));
            }
            push.operands.image.v[u * local_size + lane] = part;
        }
        [[unroll]] for (uint u = 0u; u < B_SHARE; ++u) {
            uvec4 part;
            [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                part[q] = packFloat2x16(f16vec2(b[8u * u + 2u * q], b[8u * u + 2u * q + 1u]));
            }
            push.operands.image.v[A_UNITS + u * local_size + lane] = part;
        }
        return;
    }
    [[unroll]] for (uint u = 0u; u < A_SHARE; ++u) {
        uvec4 part = push.operands.image.v[u * local_size + lane];
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            f16vec2 two = unpackFloat2x16(part[q]);
            a[8u * u + 2u * q] = two.x;
            a[8u * u + 2u * q + 1u] = two.y;
        }
    }
    [[unroll]] for (uint u = 0u; u < B_SHARE; ++u) {
        uvec4 part = push.operands.image.v[A_UNITS + u * local_size + lane];
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            f16vec2 two = unpackFloat2x16(part[q]);
            b[8u * u + 2u * q] = two.x;
            b[8u * u + 2u * q + 1u] = two.y;
        }
    }
    coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator> sum =
        coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>(0.0);
    sum = coopMatMulAdd(a, b, sum);
    coopMatStore(sum, staged, 0u, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
    barrier();
    for (uint i = lane; i < D_UNITS; i += local_size) {
        push.operands.d.v[i] = staged[i];
    }
}
