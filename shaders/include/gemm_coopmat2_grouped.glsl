// SPDX-License-Identifier: MIT
// main() of the GEMMs grouped over rows on matrix units by whole workgroups; see
// grouped_gemm_coopmat2_nt.comp.
layout(local_size_x_id = 0) in;

void main() {
    uint group = OF_GROUP(push.operands.tiles.v[2u * gl_WorkGroupID.x]);
    CoopmatTile t;
    t.m0 = OF_GROUP(push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u]);
    t.n0 = gl_WorkGroupID.y * BLOCK_N;
    t.rows = OF_GROUP(push.operands.group_ends.v[group]);
    t.columns = push.n;
    t.a = uvec2(push.operands.a);
    t.b = address_add(uvec2(push.operands.b), group, push.stride_b, B_LOG2_BYTES);
    t.lda = push.lda;
    t.ldb = push.ldb;
    t.k_begin = 0u;
    t.k_end = push.k;
    gemm_coopmat(t, push.rows, uvec2(push.operands.d), push.ldd, push.alpha,
                 push.accumulate != 0u);
}
