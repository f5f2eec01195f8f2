// SPDX-License-Identifier: MIT
// main() of the GEMMs grouped over rows; see grouped_gemm_nt.comp.
layout(local_size_x_id = 0) in;

void main() {
    uint group = push.operands.tiles.v[2u * gl_WorkGroupID.x];
    uint row_group = local_size == 8u ? 0u : gl_LocalInvocationIndex / 8u;
    GemmTile t;
    t.m0 = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u] + row_group * rows_per_tile;
    t.rows = push.operands.group_ends.v[group];
    if (t.m0 >= t.rows) {
        return;
    }
    t.n0 = (gl_WorkGroupID.y * 8u + gl_LocalInvocationIndex % 8u) * 4u;
    t.columns = push.n;
    t.a = uvec2(push.operands.a);
    t.b = address_add(uvec2(push.operands.b), group, push.stride_b, B_LOG2_BYTES);
    t.lda = push.lda;
    t.ldb = push.ldb;
    t.k_begin = 0u;
    t.k_end = push.k;
    gemm_tile(t, uvec2(push.operands.d), push.ldd, push.alpha, push.accumulate != 0u);
}
