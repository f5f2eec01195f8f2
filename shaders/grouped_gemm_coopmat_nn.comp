// SPDX-License-Identifier: MIT
// Grouped GEMM over rows on matrix units, D[r] = alpha * A[r] * B[g] (+ D[r]), B [groups, k, n];
// the rest: grouped_gemm_coopmat_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat_nn.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_grouped.glsl"
