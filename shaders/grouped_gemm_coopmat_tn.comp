// SPDX-License-Identifier: MIT
// Grouped GEMM on matrix units whose sum runs over the rows of a group (a weight's gradient);
// formula and operands: grouped_gemm_tn.comp; the rest: gemm_coopmat_nt.comp.
// Dispatch   x = ceil(m / BLOCK_M), y = ceil(n / BLOCK_N), z = groups.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 2
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat_tn.kernel.glsl"

#include "include/gemm_coopmat.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint group = gl_WorkGroupID.z;
    CoopmatTile t;
    t.k_begin = push.operands.group_begins.v[group];
    t.k_end = push.operands.group_ends.v[group];
    if (t.k_begin == t.k_end && push.accumulate != 0u) {
        return;
    }
    t.a = uvec2(push.operands.a);
    t.b = uvec2(push.operands.b);
    t.lda = push.lda;
    t.ldb = push.ldb;
    t.m0 = gl_WorkGroupID.x * BLOCK_M;
    t.n0 = gl_WorkGroupID.y * BLOCK_N;
    t.rows = push.m;
    t.columns = push.n;
    uvec2 d = address_add(uvec2(push.operands.d), group, push.stride_d, D_LOG2_BYTES);
    gemm_coopmat(t, d, push.ldd, push.alpha, push.accumulate != 0u);
}
