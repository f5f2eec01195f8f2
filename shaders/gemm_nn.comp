// SPDX-License-Identifier: MIT
// Dense GEMM, D = alpha * A * B (+ D), for every batch index b:
//   D[b][m][n] = alpha * sum over k of A[b][m][k] * B[b][k][n]  (+ D[b][m][n] when `accumulate`)
// Operands, variants, constants, dispatch and order of sums: gemm_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"
#include "gemm_nn.kernel.glsl"
#include "include/gemm_tile.glsl"
#include "include/gemm_dense.glsl"
