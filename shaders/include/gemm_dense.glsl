// SPDX-License-Identifier: MIT
// main() of the dense GEMM kernels; see gemm_nt.comp.
layout(local_size_x_id = 0) in;

void main() {
    // With one row group per workgroup m0 depends on the workgroup alone, which drivers see.
    uint row_group = local_size == 8u ? 0u : gl_LocalInvocationIndex / 8u;
    GemmTile t;
    t.m0 = (gl_WorkGroupID.x * (local_size / 8u) + row_group) * rows_per_tile;
    t.n0 = (gl_WorkGroupID.y * 8u + gl_LocalInvocationIndex % 8u) * 4u;
    if (t.m0 >= push.m) {
        return;
    }
    uint batch = gl_WorkGroupID.z;
    t.a = address_add(uvec2(push.operands.a), batch, push.stride_a, A_LOG2_BYTES);
    t.b = address_add(uvec2(push.operands.b), batch, push.stride_b, B_LOG2_BYTES);
    uvec2 d = address_add(uvec2(push.operands.d), batch, push.stride_d, D_LOG2_BYTES);
    t.lda = push.lda;
    t.ldb = push.ldb;
    t.rows = push.m;
    t.columns = push.n;
    t.k_begin = 0u;
    t.k_end = push.k;
    gemm_tile(t, d, push.ldd, push.alpha, push.accumulate != 0u);
}
