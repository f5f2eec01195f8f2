// SPDX-License-Identifier: MIT
// Dense GEMM, D = alpha * transpose(A) * B (+ D), for every batch index b:
//   D[b][m][n] = alpha * sum over k of A[b][k][m] * B[b][k][n]  (+ D[b][m][n] when `accumulate`)
// Operands, variants, constants, dispatch and order of sums: gemm_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 2
#include "include/gemm_operands.glsl"
#include "gemm_tn.kernel.glsl"
#include "include/gemm_tile.glsl"
#include "include/gemm_dense.glsl"
