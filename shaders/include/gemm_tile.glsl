// SPDX-License-Identifier: MIT
// The register tile of a portable GEMM: one invocation computes rows_per_tile x 4 elements of D, eight
// neighbouring invocations a tile of rows_per_tile x 32. They share their rows of A, so those loads are
// uniform over a subgroup of 8; no shared memory, no barrier. Each element is one chain of f32 fused
// multiply-adds in ascending k, whatever the path: all tiles and paths give the same bits.
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

// Multiplies four rows of A, one per component of `a`, by one vector of B.
#define FMA_ROWS(i, a, b)                                                                          \
    [[unroll]] for (int c_ = 0; c_ < 4; ++c_) {                                                    \
        sum[i + c_] = fma(vec4(a[c_]), b, sum[i + c_]);                                            \
    }

// Loops test at their end: some drivers run a load at a uniform address once more after a loop has
// been left at its top, and would read beyond the matrix.

// Needs what `aligned` promises, see gemm_nt.comp.
void gemm_accumulate_aligned(GemmTile t, inout vec4 sum[rows_per_tile]) {
    if (t.k_begin >= t.k_end) {
        return;
    }
    uint k = t.k_begin;
#if GEMM_FORM == 2
    uint b_index = k * t.ldb + min(t.n0, t.columns - 4u);
    uint a_index[rows_per_tile / 4];
    [[unroll]] for (int i = 0; i < int(rows_per_tile) / 4; ++i) {
        a_index[i] = k * t.lda + min(t.m0 + 4u * uint(i), t.rows - 4u);
    }
    do {
        vec4 b = load_b4(t.b, b_index);
        b_index += t.ldb;
        [[unroll]] for (int i = 0; i < int(rows_per_tile) / 4; ++i) {
            vec4 a = load_a4(t.a, a_index[i]);
            a_index[i] += t.lda;
            FMA_ROWS(4 * i, a, b)
        }
        k += 1u;
    } while (k < t.k_end);
#else
    uint a_row[rows_per_tile];
    FOR_ROWS(i) {
        a_row[i] = clamp_row(t, i) * t.lda;
    }
#if GEMM_FORM == 0
    uint b_row[4];
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
        b_row[c] = clamp_column(t, c) * t.ldb;
    }
#else
    uint column = min(t.n0, t.columns - 4u);
#endif
    do {
        vec4 b[4];
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
#if GEMM_FORM == 0
            b[c] = load_b4(t.b, b_row[c] + k);
        }
        mat4 transposed = transpose(mat4(b[0], b[1], b[2], b[3]));
        [[unroll]] for (int c = 0; c < 4; ++c) {
            b[c] = transposed[c];
#else
            b[c] = load_b4(t.b, (k + c) * t.ldb + column);
#endif
        }
        FOR_ROWS(i) {
            vec4 a = load_a4(t.a, a_row[i] + k);
            [[unroll]] for (int c = 0; c < 4; ++c) {
                sum[i] = fma(vec4(a[c]), b[c], sum[i]);
            }
        }
        k += 4u;
    } while (k < t.k_end);
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

void gemm_store(GemmTile t, uvec2 d, uint ldd, vec4 sum[rows_per_tile], float alpha, bool accumulate,
                bool whole) {
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

#endif
