// SPDX-License-Identifier: MIT
// Dense GEMM, D = alpha * A * transpose(B) (+ D), for every batch index b:
//   D[b][m][n] = alpha * sum over k of A[b][m][k] * B[b][n][k]  (+ D[b][m][n] when `accumulate`)
// gemm_nn reads B as [k][n]; gemm_tn reads A as [k][m] and B as [k][n]. They share this contract.
//
// Operands   element (b, row, column) stands at b * stride + row * ld + column, in elements:
//   a        nt, nn: rows m, columns k.   tn: rows k, columns m.      f32 or bf16, lda
//   b        nt: rows n, columns k.       nn, tn: rows k, columns n.  f32 or bf16, ldb
//   d        rows m, columns n.                                       f32 or bf16, ldd
//   One matrix spans less than 2^32 elements; strides are below 2^32 too, their product with the
//   batch index is not limited. D starts at a multiple of 4 bytes and may not overlap A or B; if it
//   is bf16, ldd and stride_d are even. What stands between columns n and ldd is neither used nor
//   changed. k = 0 gives 0 (or leaves D when accumulating).
// Variants   <type of a>_<type of b>_<type of d>;
//            index = 4 * (a is bf16) + 2 * (b is bf16) + (d is bf16).
// Constants  local_size     invocations per workgroup, a multiple of 8 (8 for a CPU, 64 for a GPU)
//            aligned        1 if n, ldb, ldd, every stride, and for nt and nn k and lda, for tn m
//                           and lda, are multiples of 4, and a, b and d start at a multiple of four
//                           elements' bytes (16 for f32, 8 for bf16). 0 serves everything, slower,
//                           same bits.
//            rows_per_tile  rows of D per invocation, a multiple of 4: 32 for a CPU, 8 or 16 for a
//                           GPU, 4 for few rows.
//            share_a        1: invocations load A's tile together and pass it round; needs
//                           aligned = 1, local_size = 8, a subgroup size of 8 and rows_per_tile a
//                           multiple of 8. Twice as fast on lavapipe before Mesa 26, slower from
//                           there on.
// Dispatch   x = ceil(m / (rows_per_tile * local_size / 8)), y = ceil(n / 32), z = batches.
//            No shared memory.
// Order      f32 fused multiply-adds in ascending k from 0, then alpha, then D: the bits of an
//            element do not depend on m, n, the batch, a constant, or where the element stands.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"
#include "gemm_nt.kernel.glsl"
#include "include/gemm_tile.glsl"
#include "include/gemm_dense.glsl"
