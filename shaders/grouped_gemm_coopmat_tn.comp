// SPDX-License-Identifier: MIT
// Grouped GEMM on matrix units whose sum runs over the rows of a group (a weight's gradient);
// formula and operands: grouped_gemm_tn.comp; the rest: gemm_coopmat_nt.comp.
// Dispatch   x = ceil(m / BLOCK_M), y = ceil(n / BLOCK_N), z = groups.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 2
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat_tn.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_along.glsl"
