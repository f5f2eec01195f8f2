// SPDX-License-Identifier: MIT
// Grouped GEMM over rows: every row of A belongs to a group, every group has its own B.
//   D[r][n] = alpha * sum over k of A[r][k] * B[g][k][n]  (+ D[r][n] when `accumulate`)
//   for g in groups, group_begins[g] <= r < group_ends[g]; no other row is read or written.
// Operands and everything else: grouped_gemm_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"

#include "grouped_gemm_nn.kernel.glsl"

#include "include/gemm_tile.glsl"

#include "include/gemm_grouped.glsl"
