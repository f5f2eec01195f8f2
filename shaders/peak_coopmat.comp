// SPDX-License-Identifier: MIT
// The device's rate of cooperative matrix products on registers: the ceiling that GEMM figures on
// matrix units are shown as a share of. Each subgroup runs kChains independent chains of `steps`
//   s = a * b + s, all elements of a are `factor`, of b 1, s starts as the chain's number,
// and stores the sum of its chains, so that nothing can be left out.
//   sums [subgroups, mma_m, mma_n] f32, each kChains * steps * mma_k * factor + 0 + 1 + ...
// Constants  mma_m, mma_n, mma_k: a row that the device enumerates; local_size: a multiple of the
//            subgroup size.
// Dispatch: any number of workgroups. 2 * kChains * steps * mma_m * mma_n * mma_k floating-point
// operations per subgroup.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#include "include/common.glsl"
#include "peak_coopmat.kernel.glsl"

#if MATRIX_BF16
#define MATRIX_TYPE bfloat16_t
#else
#define MATRIX_TYPE float16_t
#endif
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

const uint kChains = 8u;

void main() {
    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a =
        coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>(
            MATRIX_TYPE(push.factor));
    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b =
        coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>(MATRIX_TYPE(1.0));
    ACCUMULATOR chain[kChains];
    [[unroll]] for (uint i = 0u; i < kChains; ++i) {
        chain[i] = ACCUMULATOR(float(i));
    }
    for (uint step = 0u; step < push.steps; ++step) {
        [[unroll]] for (uint i = 0u; i < kChains; ++i) {
            chain[i] = coopMatMulAdd(a, b, chain[i]);
        }
    }
    [[unroll]] for (uint i = 1u; i < kChains; ++i) {
        chain[0] += chain[i];
    }
    uint subgroup = gl_WorkGroupID.x * gl_NumSubgroups + gl_SubgroupID;
    coopMatStore(chain[0], push.operands.sums.v, subgroup * mma_m * mma_n, mma_n,
                 gl_CooperativeMatrixLayoutRowMajor);
}
