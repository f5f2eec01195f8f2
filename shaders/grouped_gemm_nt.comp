// SPDX-License-Identifier: MIT
// Grouped GEMM over rows: every row of A belongs to a group, every group has its own B.
//   D[r][n] = alpha * sum over k of A[r][k] * B[g][n][k]  (+ D[r][n] when `accumulate`)
//   for g in groups, group_begins[g] <= r < group_ends[g]; no other row is read or written.
// (y = x * transpose(W_g); grouped_gemm_nn reads B as [g][k][n]: dx = dy * W_g.)
//
// group_ends, tiles  as grouped_gemm_tiles.comp takes and leaves them, for this kernel's tile height
// a          [rows, k] rows lda elements apart.    f32 or bf16
// b          [groups, n, k] (nn: [groups, k, n]), groups stride_b and rows ldb elements apart
// d          [rows, n] rows ldd elements apart.    f32 or bf16
// Limits, variants, constants and order of sums: gemm_nt.comp. `aligned` asks the same of n, k,
// lda, ldb, ldd, stride_b. A row has the bits that gemm_nt gives it, whatever its group's size.
// Dispatch   indirect: x = number of tiles, y = ceil(n / 32), z = 1. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "grouped_gemm_nt.kernel.glsl"

#include "include/gemm_tile.glsl"

#include "include/gemm_grouped.glsl"
