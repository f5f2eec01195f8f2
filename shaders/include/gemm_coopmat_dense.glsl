// SPDX-License-Identifier: MIT
// main() of the dense GEMM kernels on matrix units; see gemm_coopmat_nt.comp.
layout(local_size_x_id = 0) in;

void main() {
    // Workgroups start about in the order of their index: in bands of `band` rows of tiles, so that
    // those which run together find their parts of A and B in the cache.
    uint index = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint tiles = band * gl_NumWorkGroups.y;
    uint first = index / tiles * band;
    uint height = min(band, gl_NumWorkGroups.x - first);
    uint within = index % tiles;

    uint batch = gl_WorkGroupID.z;
    CoopmatTile t;
    t.a = address_add(uvec2(push.operands.a), batch, push.stride_a, A_LOG2_BYTES);
    t.b = address_add(uvec2(push.operands.b), batch, push.stride_b, B_LOG2_BYTES);
    uvec2 d = address_add(uvec2(push.operands.d), batch, push.stride_d, D_LOG2_BYTES);
    t.lda = push.lda;
    t.ldb = push.ldb;
    t.m0 = (first + within % height) * BLOCK_M;
    t.n0 = within / height * BLOCK_N;
    t.rows = push.m;
    t.columns = push.n;
    t.k_begin = 0u;
    t.k_end = push.k;
    gemm_coopmat(t, d, push.ldd, push.alpha, push.accumulate != 0u);
}
