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

// Eight elements to a uvec4.
#define A_STRIDE ((A_COLUMNS + PADDING) / 8u)
#define B_STRIDE ((B_COLUMNS + PADDING) / 8u)
shared uvec4 a_stage[A_ROWS * A_STRIDE];
shared uvec4 b_stage[B_ROWS * B_STRIDE];
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

#define A_OCTETS (A_ROWS * A_COLUMNS / 8u / local_size)
#define B_OCTETS (B_ROWS * B_COLUMNS / 8u / local_size)
uvec4 a_next[A_OCTETS];
uvec4 b_next[B_OCTETS];

void fetch(CoopmatTile t, uint k) {
#if GEMM_FORM == 2
    uint a_row = k, a_column = t.m0, a_rows = t.k_end, a_columns = t.rows;
#else
    uint a_row = t.m0, a_column = k, a_rows = t.rows, a_columns = t.k_end;
#endif
    [[unroll]] for (uint i = 0u; i < A_OCTETS; ++i) {
        uint octet = i * local_size + gl_LocalInvocationIndex;
        uint row = a_row + octet / (A_COLUMNS / 8u);
        uint column = a_column + octet % (A_COLUMNS / 8u) * 8u;
        a_next[i].xy = load_quad_a(t.a, row, column, a_rows, a_columns, t.lda);
        a_next[i].zw = load_quad_a(t.a, row, column + 4u, a_rows, a_columns, t.lda);
    }
#if GEMM_FORM == 0
    uint b_row = t.n0, b_column = k, b_rows = t.columns, b_columns = t.k_end;
#else
    uint b_row = k, b_column = t.n0, b_rows = t.k_end, b_columns = t.columns;
#endif
    [[unroll]] for (uint i = 0u; i < B_OCTETS; ++i) {
        uint octet = i * local_size + gl_LocalInvocationIndex;
        uint row = b_row + octet / (B_COLUMNS / 8u);
        uint column = b_column + octet % (B_COLUMNS / 8u) * 8u;
        b_next[i].xy = load_quad_b(t.b, row, column, b_rows, b_columns, t.ldb);
        b_next[i].zw = load_quad_b(t.b, row, column + 4u, b_rows, b_columns, t.ldb);
    }
}

void stage() {
    [[unroll]] for (uint i = 0u; i < A_OCTETS; ++i) {
        uint octet = i * local_size + gl_LocalInvocationIndex;
        a_stage[octet / (A_COLUMNS / 8u) * A_STRIDE + octet % (A_COLUMNS / 8u)] = a_next[i];
    }
    [[unroll]] for (uint i = 0u; i < B_OCTETS; ++i) {
        uint octet = i * local_size + gl_LocalInvocationIndex;
        b_stage[octet / (B_COLUMNS / 8u) * B_STRIDE + octet % (B_COLUMNS / 8u)] = b_next[i];
    }
}

// Where the fragment at (row or column, k) starts in the staged block.
#if GEMM_FORM == 2
#define A_START(m, k) ((k) * A_STRIDE + (m) / 8u)
#else
#define A_START(m, k) ((m) * A_STRIDE + (k) / 8u)
#endif
#if GEMM_FORM == 0
#define B_START(n, k) ((n) * B_STRIDE + (k) / 8u)
#else
#define B_START(n, k) ((k) * B_STRIDE + (n) / 8u)
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
                    uint start = A_START(warp_m + i * mma_m, step);
                    coopMatLoad(a[i], a_stage, start, A_STRIDE, A_LAYOUT);
                }
                [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
                    coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
                    uint start = B_START(warp_n + j * mma_n, step);
                    coopMatLoad(b, b_stage, start, B_STRIDE, B_LAYOUT);
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
