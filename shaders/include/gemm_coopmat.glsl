// SPDX-License-Identifier: MIT
// The workgroup tile of a GEMM on matrix units (GL_KHR_cooperative_matrix). A workgroup of
// warps_m x warps_n subgroups computes block_m x block_n elements of D; each subgroup has
// fragments_m x fragments_n matrices of mma_m x mma_n. Per block_k of the sum the workgroup
// converts its parts of A and B to the matrix element type (f16, or bf16 with MATRIX_BF16 = 1) in
// shared memory, while the loads of the next block are under way. Sums are f32. What lies beyond
// the matrices is staged as 0.
//
// GEMM_FORM and the storage types are those of gemm_tile.glsl. The kernel declares the constants
// local_size, aligned, mma_m, mma_n, mma_k, fragments_m, fragments_n, warps_m, warps_n, block_k.
// Shared memory: 2 * (block_m + block_n) * (block_k + 8) bytes or, what is transposed,
// 2 * (block_m + 8) * block_k, plus 4 * mma_m * mma_n bytes per subgroup.
#ifndef BELLOWS_GEMM_COOPMAT_GLSL
#define BELLOWS_GEMM_COOPMAT_GLSL

#include "gemm_operands.glsl"

#define BLOCK_M (mma_m * fragments_m * warps_m)
#define BLOCK_N (mma_n * fragments_n * warps_n)
#define PADDING 8u // elements between staged rows, against bank conflicts

// Stored rows and columns of a staged block, columns contiguous.
#if GEMM_FORM == 2
#define A_ROWS block_k
#define A_COLUMNS BLOCK_M
#define A_LAYOUT gl_CooperativeMatrixLayoutColumnMajor
#else
#define A_ROWS BLOCK_M
#define A_COLUMNS block_k
#define A_LAYOUT gl_CooperativeMatrixLayoutRowMajor
#endif
#if GEMM_FORM == 0
#define B_ROWS BLOCK_N
#define B_COLUMNS block_k
#define B_LAYOUT gl_CooperativeMatrixLayoutColumnMajor
#else
#define B_ROWS block_k
#define B_COLUMNS BLOCK_N
#define B_LAYOUT gl_CooperativeMatrixLayoutRowMajor
#endif

// Two elements to a word.
#define A_STRIDE ((A_COLUMNS + PADDING) / 2u)
#define B_STRIDE ((B_COLUMNS + PADDING) / 2u)
shared uint a_stage[A_ROWS * A_STRIDE];
shared uint b_stage[B_ROWS * B_STRIDE];
shared float d_stage[warps_m * warps_n * mma_m * mma_n];

#if MATRIX_BF16
#define MATRIX_TYPE bfloat16_t
uvec2 matrix_pack(vec4 x) {
    return bf16_pack(x);
}
#else
#define MATRIX_TYPE float16_t
uvec2 matrix_pack(vec4 x) {
    return uvec2(packHalf2x16(x.xy), packHalf2x16(x.zw));
}
#endif

struct CoopmatTile {
    uvec2 a;      // addresses of A and B
    uvec2 b;
    uint lda;     // elements from one stored row to the next
    uint ldb;
    uint m0;      // first row and column of the tile
    uint n0;
    uint rows;    // rows and columns of D that exist
    uint columns;
    uint k_begin; // sum over k_begin <= k < k_end
    uint k_end;
};

// Four neighbours as they are staged; bf16 storage goes into bf16 matrices as it is.
#if MATRIX_BF16 && A_BF16
#define MATRIX_A4(base, index) ReadUvec2(base).v[(index) >> 2]
#else
#define MATRIX_A4(base, index) matrix_pack(load_a4(base, index))
#endif
#if MATRIX_BF16 && B_BF16
#define MATRIX_B4(base, index) ReadUvec2(base).v[(index) >> 2]
#else
#define MATRIX_B4(base, index) matrix_pack(load_b4(base, index))
#endif

// Four neighbours of a stored row of A or B in the matrix type, 0 beyond `rows` and `columns`.
#define LOAD_QUAD(name, MATRIX_4, load1)                                                           \
    uvec2 name(uvec2 base, uint row, uint column, uint rows, uint columns, uint ld) {              \
        uint start = min(row, rows - 1u) * ld;                                                     \
        if (aligned != 0u) {                                                                       \
            uvec2 quad = MATRIX_4(base, start + min(column, columns - 4u));                        \
            return row < rows && column < columns ? quad : uvec2(0);                               \
        }                                                                                          \
        vec4 x;                                                                                    \
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {                                                \
            float value = load1(base, start + min(column + e, columns - 1u));                      \
            x[e] = row < rows && column + e < columns ? value : 0.0;                               \
        }                                                                                          \
        return matrix_pack(x);                                                                     \
    }
LOAD_QUAD(load_quad_a, MATRIX_A4, load_a)
LOAD_QUAD(load_quad_b, MATRIX_B4, load_b)

#define A_QUADS (A_ROWS * A_COLUMNS / 4u / local_size)
#define B_QUADS (B_ROWS * B_COLUMNS / 4u / local_size)
uvec2 a_next[A_QUADS];
uvec2 b_next[B_QUADS];

void fetch(CoopmatTile t, uint k) {
    [[unroll]] for (uint i = 0u; i < A_QUADS; ++i) {
        uint quad = i * local_size + gl_LocalInvocationIndex;
        uint row = quad / (A_COLUMNS / 4u), column = quad % (A_COLUMNS / 4u) * 4u;
#if GEMM_FORM == 2
        a_next[i] = load_quad_a(t.a, k + row, t.m0 + column, t.k_end, t.rows, t.lda);
#else
        a_next[i] = load_quad_a(t.a, t.m0 + row, k + column, t.rows, t.k_end, t.lda);
#endif
    }
    [[unroll]] for (uint i = 0u; i < B_QUADS; ++i) {
        uint quad = i * local_size + gl_LocalInvocationIndex;
        uint row = quad / (B_COLUMNS / 4u), column = quad % (B_COLUMNS / 4u) * 4u;
#if GEMM_FORM == 0
        b_next[i] = load_quad_b(t.b, t.n0 + row, k + column, t.columns, t.k_end, t.ldb);
#else
        b_next[i] = load_quad_b(t.b, k + row, t.n0 + column, t.k_end, t.columns, t.ldb);
#endif
    }
}

void stage() {
    [[unroll]] for (uint i = 0u; i < A_QUADS; ++i) {
        uint quad = i * local_size + gl_LocalInvocationIndex;
        uint word = quad / (A_COLUMNS / 4u) * A_STRIDE + quad % (A_COLUMNS / 4u) * 2u;
        a_stage[word] = a_next[i].x;
        a_stage[word + 1u] = a_next[i].y;
    }
    [[unroll]] for (uint i = 0u; i < B_QUADS; ++i) {
        uint quad = i * local_size + gl_LocalInvocationIndex;
        uint word = quad / (B_COLUMNS / 4u) * B_STRIDE + quad % (B_COLUMNS / 4u) * 2u;
        b_stage[word] = b_next[i].x;
        b_stage[word + 1u] = b_next[i].y;
    }
}

// First staged word of the fragment at (row or column `index`, k).
#if GEMM_FORM == 2
#define A_WORD(m, k) ((k) * A_STRIDE + (m) / 2u)
#else
#define A_WORD(m, k) ((m) * A_STRIDE + (k) / 2u)
#endif
#if GEMM_FORM == 0
#define B_WORD(n, k) ((n) * B_STRIDE + (k) / 2u)
#else
#define B_WORD(n, k) ((k) * B_STRIDE + (n) / 2u)
#endif

// All invocations of the workgroup call it together.
void gemm_coopmat(CoopmatTile t, uvec2 d, uint ldd, float alpha, bool accumulate) {
    uint warp_m = gl_SubgroupID % warps_m * fragments_m * mma_m;
    uint warp_n = gl_SubgroupID / warps_m * fragments_n * mma_n;
    coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>
        sum[fragments_m * fragments_n];
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        sum[i] = coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>(0.0);
    }
    if (t.k_begin < t.k_end) {
        uint k = t.k_begin;
        fetch(t, k);
        do {
            barrier(); // the previous block has been read
            stage();
            barrier();
            k += block_k;
            if (k < t.k_end) {
                fetch(t, k);
            }
            [[unroll]] for (uint step = 0u; step < block_k; step += mma_k) {
                coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a[fragments_m];
                [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                    uint word = A_WORD(warp_m + i * mma_m, step);
                    coopMatLoad(a[i], a_stage, word, A_STRIDE, A_LAYOUT);
                }
                [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
                    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
                    coopMatLoad(b, b_stage, B_WORD(warp_n + j * mma_n, step), B_STRIDE, B_LAYOUT);
                    [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                        sum[j * fragments_m + i] = coopMatMulAdd(a[i], b, sum[j * fragments_m + i]);
                    }
                }
            }
        } while (k < t.k_end);
    }

    // Each subgroup passes its matrices one by one through its own part of d_stage.
    uint part = gl_SubgroupID * mma_m * mma_n;
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        barrier();
        coopMatStore(sum[i], d_stage, part, mma_n, gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        uint first_row = t.m0 + warp_m + i % fragments_m * mma_m;
        uint first_column = t.n0 + warp_n + i / fragments_m * mma_n;
        for (uint quad = gl_SubgroupInvocationID; quad < mma_m * mma_n / 4u;
             quad += gl_SubgroupSize) {
            uint row = first_row + quad / (mma_n / 4u);
            uint column = first_column + quad % (mma_n / 4u) * 4u;
            if (row < t.rows && column < t.columns) {
                uint word = part + quad * 4u;
                vec4 x = vec4(d_stage[word], d_stage[word + 1u], d_stage[word + 2u],
                              d_stage[word + 3u]);
                if (aligned != 0u) {
                    store_d4(d, row * ldd + column, x, alpha, accumulate);
                } else {
                    uint count = min(t.columns - column, 4u);
                    store_d_part(d, row * ldd + column, x, count, alpha, accumulate);
                }
            }
        }
    }
}

#endif
