// SPDX-License-Identifier: MIT
// Grouped GEMM whose sum runs over the rows of a group (a weight's gradient, dW_g = dy^T x):
//   D[g][m][n] = alpha * sum over r of A[r][m] * B[r][n]  (+ D[g][m][n] when `accumulate`)
//   for group_begins[g] <= r < group_ends[g]; no other row is read. An empty group leaves
//   D[g] untouched when accumulating and is zero otherwise.
//
// group_begins, group_ends  uint[groups] each, begins <= ends
// a          [rows, m] rows lda elements apart.    f32 or bf16
// b          [rows, n] rows ldb elements apart.    f32 or bf16
// d          [groups, m, n] groups stride_d and rows ldd elements apart.    f32 or bf16
// Limits, variants, constants and order of sums: gemm_nt.comp. `aligned` asks that m, n, lda, ldb,
// ldd and stride_d are multiples of 4.
// Dispatch   x = ceil(m / (rows_per_tile * local_size / 8)), y = ceil(n / 32), z = groups.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 2
#include "include/gemm_operands.glsl"

#include "grouped_gemm_tn.kernel.glsl"

#include "include/gemm_tile.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint group = gl_WorkGroupID.z;
    uint row_group = local_size == 8u ? 0u : gl_LocalInvocationIndex / 8u;
    GemmTile t;
    t.m0 = (gl_WorkGroupID.x * (local_size / 8u) + row_group) * rows_per_tile;
    t.k_begin = push.operands.group_begins.v[group];
    t.k_end = push.operands.group_ends.v[group];
    bool nothing = t.k_begin == t.k_end && push.accumulate != 0u;
    if (t.m0 >= push.m || nothing) {
        return;
    }
    t.n0 = (gl_WorkGroupID.y * 8u + gl_LocalInvocationIndex % 8u) * 4u;
    t.rows = push.m;
    t.columns = push.n;
    t.a = uvec2(push.operands.a);
    t.b = uvec2(push.operands.b);
    t.lda = push.lda;
    t.ldb = push.ldb;
    uvec2 d = address_add(uvec2(push.operands.d), group, push.stride_d, D_LOG2_BYTES);
    gemm_tile(t, d, push.ldd, push.alpha, push.accumulate != 0u);
}
