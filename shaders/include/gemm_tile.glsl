// SPDX-License-Identifier: MIT
// The register tile of a portable GEMM: one invocation computes rows_per_tile x 4 elements of D,
// eight neighbouring invocations a tile of rows_per_tile x 32. They share their rows of A, so those
// loads are uniform over a subgroup of 8; no shared memory, no barrier. Each element is one chain
// of f32 fused multiply-adds in ascending k: all tiles and paths give the same bits. The kernel
// declares the constants aligned, rows_per_tile and share_a.
//
// GEMM_FORM: 0 nt  A[M,K] B[N,K]   1 nn  A[M,K] B[K,N]   2 tn  A[K,M] B[K,N]
#ifndef BELLOWS_GEMM_TILE_GLSL
#define BELLOWS_GEMM_TILE_GLSL

#include "gemm_operands.glsl"

struct GemmTile {
    uvec2 a;    // address of A, its row m0 = 0 is the matrix's first row
    uvec2 b;    // address of B
    uint lda;   // elements from one stored row of A to the next
    uint ldb;
    uint m0;    // first row of the tile
    uint rows;  // rows of A and D that exist (> m0)
    uint n0;    // this invocation's first column
    uint columns; // columns that exist; n0 may lie beyond
    uint k_begin; // sum over k_begin <= k < k_end
    uint k_end;
};

#define FOR_ROWS(i) [[unroll]] for (int i = 0; i < int(rows_per_tile); ++i)

// Indices of what lies beyond the matrix are clamped to its last row or column: such elements are
// computed from valid memory and never stored.
uint clamp_row(GemmTile t, int i) {
    return min(t.m0 + uint(i), t.rows - 1u);
}
uint clamp_column(GemmTile t, uint c) {
    return min(t.n0 + c, t.columns - 1u);
}

// Loops test at their end: some drivers run a load at a uniform address once more after a loop has
// been left at its top, and would read beyond the matrix.
//
// Four steps of k. With share_a the eight invocations load different parts of A's tile and pass
// them round: drivers that load a uniform address once per invocation do an eighth of the work.
#if GEMM_FORM == 2
// Part p of the four rows k .. k+3 of A's tile: k + p / (rows_per_tile / 4), columns 4 * (p % ...).
#define A_PARTS (rows_per_tile / 4u)
vec4 load_a_part(GemmTile t, uint k, uint part) {
    uint first = min(t.m0 + 4u * (part % A_PARTS), t.rows - 4u);
    return load_a4(t.a, (k + part / A_PARTS) * t.lda + first);
}
#else
// Part p of the columns k .. k+3 of A's tile: row p.
#define A_PARTS rows_per_tile
vec4 load_a_part(GemmTile t, uint k, uint part) {
    return load_a4(t.a, clamp_row(t, int(part)) * t.lda + k);
}
#endif

void gemm_four_steps(GemmTile t, uint k, inout vec4 sum[rows_per_tile]) {
    vec4 b[4];
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
#if GEMM_FORM == 0
        b[c] = load_b4(t.b, clamp_column(t, c) * t.ldb + k);
#else
        b[c] = load_b4(t.b, (k + c) * t.ldb + min(t.n0, t.columns - 4u));
#endif
    }
#if GEMM_FORM == 0
    mat4 transposed = transpose(mat4(b[0], b[1], b[2], b[3]));
    [[unroll]] for (int c = 0; c < 4; ++c) {
        b[c] = transposed[c];
    }
#endif
    vec4 mine[(rows_per_tile + 7u) / 8u];
    if (share_a != 0u) {
        [[unroll]] for (uint p = 0u; p < rows_per_tile / 8u; ++p) {
            mine[p] = load_a_part(t, k, p * 8u + gl_LocalInvocationIndex % 8u);
        }
    }
    [[unroll]] for (uint p = 0u; p < rows_per_tile; ++p) {
        vec4 a = share_a != 0u ? subgroupBroadcast(mine[p / 8u], p % 8u) : load_a_part(t, k, p);
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
#if GEMM_FORM == 2
            uint i = 4u * (p % A_PARTS) + c;
            sum[i] = fma(vec4(a[c]), b[p / A_PARTS], sum[i]);
#else
            sum[p] = fma(vec4(a[c]), b[c], sum[p]);
#endif
        }
    }
}

#if GEMM_FORM == 2
void gemm_one_step(GemmTile t, uint k, inout vec4 sum[rows_per_tile]) {
    vec4 b = load_b4(t.b, k * t.ldb + min(t.n0, t.columns - 4u));
    [[unroll]] for (uint p = 0u; p < A_PARTS; ++p) {
        vec4 a = load_a_part(t, k, p);
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            sum[4u * p + c] = fma(vec4(a[c]), b, sum[4u * p + c]);
        }
    }
}
#endif

// Needs what `aligned` promises, see gemm_nt.comp.
void gemm_accumulate_aligned(GemmTile t, inout vec4 sum[rows_per_tile]) {
    uint k = t.k_begin;
    uint whole = k + ((t.k_end - k) & ~3u);
    if (k < whole) {
        do {
            gemm_four_steps(t, k, sum);
            k += 4u;
        } while (k < whole);
    }
#if GEMM_FORM == 2
    if (k < t.k_end) {
        do {
            gemm_one_step(t, k, sum);
            k += 1u;
        } while (k < t.k_end);
    }
#endif
}

// Any size and leading dimension.
void gemm_accumulate_general(GemmTile t, inout vec4 sum[rows_per_tile]) {
    if (t.k_begin >= t.k_end) {
        return;
    }
    uint k = t.k_begin;
    do {
        vec4 b;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
#if GEMM_FORM == 0
            b[c] = load_b(t.b, clamp_column(t, c) * t.ldb + k);
#else
            b[c] = load_b(t.b, k * t.ldb + clamp_column(t, c));
#endif
        }
        FOR_ROWS(i) {
#if GEMM_FORM == 2
            float a = load_a(t.a, k * t.lda + clamp_row(t, i));
#else
            float a = load_a(t.a, clamp_row(t, i) * t.lda + k);
#endif
            sum[i] = fma(vec4(a), b, sum[i]);
        }
        k += 1u;
    } while (k < t.k_end);
}

void gemm_store(GemmTile t, uvec2 d, uint ldd, vec4 sum[rows_per_tile], float alpha,
                bool accumulate, bool whole) {
    FOR_ROWS(i) {
        uint row = t.m0 + uint(i);
        if (row < t.rows && t.n0 < t.columns) {
            uint index = row * ldd + t.n0;
            if (whole) {
                store_d4(d, index, sum[i], alpha, accumulate);
            } else {
                store_d_part(d, index, sum[i], min(t.columns - t.n0, 4u), alpha, accumulate);
            }
        }
    }
}

// The whole way: sum, scale, store.
void gemm_tile(GemmTile t, uvec2 d, uint ldd, float alpha, bool accumulate) {
    vec4 sum[rows_per_tile];
    FOR_ROWS(i) {
        sum[i] = vec4(0);
    }
    if (aligned != 0u) {
        gemm_accumulate_aligned(t, sum);
    } else {
        gemm_accumulate_general(t, sum);
    }
    gemm_store(t, d, ldd, sum, alpha, accumulate, aligned != 0u);
}

#endif
