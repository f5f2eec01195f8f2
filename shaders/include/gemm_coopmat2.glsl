// SPDX-License-Identifier: MIT
// The workgroup tile of a GEMM of bf16 operands on matrix units that a whole workgroup multiplies
// with (GL_NV_cooperative_matrix2): block_m x block_n elements of D, in steps of block_k. The driver
// moves the operands. Sums are f32, in ascending steps of block_k from k_begin. A step that needs it
// is loaded with what lies outside as 0; all others are loaded without such tests, which would halve
// the speed. What is multiplied is the same.
//
// GEMM_FORM: 0 nt  A[M,K] B[N,K]   1 nn  A[M,K] B[K,N]   2 tn  A[K,M] B[K,N]
// Constants of the kernel: see gemm_coopmat2_nt.comp.
#ifndef BELLOWS_GEMM_COOPMAT2_GLSL
#define BELLOWS_GEMM_COOPMAT2_GLSL

#include "coopmat_tile.glsl"
#include "gemm_operands.glsl"

#define BLOCK_M block_m
#define BLOCK_N block_n
#define UNROLLED 4u // steps
// What has been loaded for a workgroup: loops that it bounds and addresses that follow from it are
// no invocation's own.
#define OF_GROUP(x) subgroupBroadcastFirst(x)

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer ReadMatrix {
    bfloat16_t v[];
};
#if D_BF16
#define D_TYPE bfloat16_t
#else
#define D_TYPE float
#endif
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer WriteMatrix {
    D_TYPE v[];
};

#define A_MATRIX coopmat<bfloat16_t, gl_ScopeWorkgroup, block_m, block_k, gl_MatrixUseA>
#define B_MATRIX coopmat<bfloat16_t, gl_ScopeWorkgroup, block_k, block_n, gl_MatrixUseB>
#define SUMS coopmat<float, gl_ScopeWorkgroup, block_m, block_n, gl_MatrixUseAccumulator>
#define D_MATRIX coopmat<D_TYPE, gl_ScopeWorkgroup, block_m, block_n, gl_MatrixUseAccumulator>

// A matrix in memory. Elements outside TRIMMED are read as 0 and not written; INSIDE has none.
#define INSIDE tensorLayoutNV<2, gl_CooperativeMatrixClampModeUndefinedNV>
#define TRIMMED tensorLayoutNV<2, gl_CooperativeMatrixClampModeConstantNV>
#define SET_LAYOUT(layout, rows, columns, ld)                                                      \
    layout = setTensorLayoutDimensionNV(layout, rows, columns);                                    \
    layout = setTensorLayoutStrideNV(layout, ld, 1u)

// Of an operand, the part of a step that begins `k` behind the address; memory has k as the columns
// or, BY_K, as the rows.
#if GEMM_FORM == 2
#define A_BY_K true
#define A_PART(layout, k) sliceTensorLayoutNV(layout, k, block_k, 0u, block_m), turned
#else
#define A_BY_K false
#define A_PART(layout, k) sliceTensorLayoutNV(layout, 0u, block_m, k, block_k)
#endif
#if GEMM_FORM == 0
#define B_BY_K false
#define B_PART(layout, k) sliceTensorLayoutNV(layout, 0u, block_n, k, block_k), turned
#else
#define B_BY_K true
#define B_PART(layout, k) sliceTensorLayoutNV(layout, k, block_k, 0u, block_n)
#endif

#define ADVANCE(count)                                                                             \
    {                                                                                              \
        a = advance(a, lda, A_BY_K, count);                                                        \
        b = advance(b, ldb, B_BY_K, count);                                                        \
        left -= count;                                                                             \
    }
#define MULTIPLY(a_layout, b_layout, k)                                                            \
    {                                                                                              \
        A_MATRIX x;                                                                                \
        B_MATRIX y;                                                                                \
        coopMatLoadTensorNV(x, ReadMatrix(a).v, 0, A_PART(a_layout, k));                           \
        coopMatLoadTensorNV(y, ReadMatrix(b).v, 0, B_PART(b_layout, k));                           \
        sums = coopMatMulAdd(x, y, sums);                                                          \
    }

// The address of an operand's element (x, k).
uvec2 element(uvec2 base, uint ld, bool by_k, uint x, uint k) {
    return address_add(address_add(base, by_k ? k : x, ld, 1u), by_k ? x : k, 1u, 1u);
}

// `count` k further.
uvec2 advance(uvec2 address, uint ld, bool by_k, uint count) {
    return address_add(address, count, by_k ? ld : 1u, 1u);
}

float accumulated(const in uint row, const in uint column, const in float sum, const in float old,
                  const in float alpha) {
    return gemm_result(sum, old, alpha, true);
}

// To what bf16 holds, nearest even: drivers convert matrices as they like (NVIDIA's cuts off).
float rounded(const in uint row, const in uint column, const in float sum) {
    return uintBitsToFloat(bf16_code(sum) << 16u);
}

// All invocations of the workgroup call it together. a_rows: rows of A that may be read, for nt and
// nn; they are as many as t.rows or more.
void gemm_coopmat(CoopmatTile t, uint a_rows, uvec2 d, uint ldd, float alpha, bool accumulate) {
    const tensorViewNV<2, false, 1, 0> turned = createTensorViewNV(2, false, 1, 0);
    // That distances of rows are multiples of 8 lets the driver move 16 bytes at a time.
    const uint lda = t.lda & ~7u, ldb = t.ldb & ~7u;
    ldd &= ~7u;
    const uint rows = t.rows - t.m0, columns = t.columns - t.n0;
    const uint a_extent = A_BY_K ? rows : a_rows - t.m0;
    uvec2 a = element(t.a, lda, A_BY_K, t.m0, t.k_begin);
    uvec2 b = element(t.b, ldb, B_BY_K, t.n0, t.k_begin);
    uint left = t.k_begin < t.k_end ? t.k_end - t.k_begin : 0u;
    SUMS sums = SUMS(0.0);
    const bool whole_a = edges == 0u || a_extent >= block_m;
    const bool whole_b = edges == 0u || columns >= block_n;
    INSIDE a_inside = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeUndefinedNV);
    INSIDE b_inside = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeUndefinedNV);
    SET_LAYOUT(a_inside, A_BY_K ? UNROLLED * block_k : block_m,
               A_BY_K ? block_m : UNROLLED * block_k, lda);
    SET_LAYOUT(b_inside, B_BY_K ? UNROLLED * block_k : block_n,
               B_BY_K ? block_n : UNROLLED * block_k, ldb);
    if (whole_a && whole_b) {
        while (left >= UNROLLED * block_k) {
            [[unroll]] for (uint i = 0u; i < UNROLLED; ++i) {
                MULTIPLY(a_inside, b_inside, i * block_k)
            }
            ADVANCE(UNROLLED * block_k)
        }
        [[dont_unroll]] while (left >= block_k) {
            MULTIPLY(a_inside, b_inside, 0u)
            ADVANCE(block_k)
        }
    }
    if (edges != 0u) {
        TRIMMED a_part = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
        TRIMMED b_part = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
        if (whole_b) { // few rows read as much of B as many do
            [[dont_unroll]] while (left >= block_k) {
                SET_LAYOUT(a_part, A_BY_K ? left : a_extent, A_BY_K ? a_extent : left, lda);
                MULTIPLY(a_part, b_inside, 0u)
                ADVANCE(block_k)
            }
        }
        [[dont_unroll]] while (left > 0u) {
            SET_LAYOUT(a_part, A_BY_K ? left : a_extent, A_BY_K ? a_extent : left, lda);
            SET_LAYOUT(b_part, B_BY_K ? left : columns, B_BY_K ? columns : left, ldb);
            MULTIPLY(a_part, b_part, 0u)
            ADVANCE(min(left, block_k))
        }
    }
    WriteMatrix to = WriteMatrix(address_add(
        address_add(d, t.m0, ldd, D_LOG2_BYTES), t.n0, 1u, D_LOG2_BYTES));
    const bool whole = edges == 0u || (rows >= block_m && columns >= block_n);
    INSIDE inside = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeUndefinedNV);
    TRIMMED trimmed = createTensorLayoutNV(2, gl_CooperativeMatrixClampModeConstantNV);
    SET_LAYOUT(inside, block_m, block_n, ldd);
    SET_LAYOUT(trimmed, rows, columns, ldd);
    inside = sliceTensorLayoutNV(inside, 0u, block_m, 0u, block_n);
    trimmed = sliceTensorLayoutNV(trimmed, 0u, block_m, 0u, block_n);
    if (adds != 0u && accumulate) {
        D_MATRIX old;
        if (whole) {
            coopMatLoadTensorNV(old, to.v, 0, inside);
        } else {
            coopMatLoadTensorNV(old, to.v, 0, trimmed);
        }
        coopMatPerElementNV(sums, sums, accumulated, SUMS(old), alpha);
    } else {
        sums = sums * alpha;
    }
#if D_BF16
    coopMatPerElementNV(sums, sums, rounded);
#endif
    if (whole) {
        coopMatStoreTensorNV(D_MATRIX(sums), to.v, 0, inside);
    } else {
        coopMatStoreTensorNV(D_MATRIX(sums), to.v, 0, trimmed);
    }
}

void gemm_coopmat(CoopmatTile t, uvec2 d, uint ldd, float alpha, bool accumulate) {
    gemm_coopmat(t, t.rows, d, ldd, alpha, accumulate);
}

#endif
