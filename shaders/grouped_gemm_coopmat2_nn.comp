// SPDX-License-Identifier: MIT
// Grouped GEMM over rows on matrix units by whole workgroups, D[r] = alpha * A[r] * B[g] (+ D[r]),
// B [groups, k, n]; the rest: grouped_gemm_coopmat2_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat2.glsl"
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat2_nn.kernel.glsl"

#include "include/gemm_coopmat2.glsl"

#include "include/gemm_coopmat2_grouped.glsl"
