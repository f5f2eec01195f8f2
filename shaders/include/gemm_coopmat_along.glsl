// SPDX-License-Identifier: MIT
// main() of the GEMMs on matrix units whose sums run along the rows of groups; see
// grouped_gemm_coopmat_tn.comp.
layout(local_size_x_id = 0) in;

void main() {
    uint group = gl_WorkGroupID.z;
    CoopmatTile t;
    t.k_begin = OF_GROUP(push.operands.group_begins.v[group]);
    t.k_end = OF_GROUP(push.operands.group_ends.v[group]);
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
