// SPDX-License-Identifier: MIT
// Grouped GEMM on matrix units by whole workgroups whose sum runs over the rows of a group (a
// weight's gradient); formula and operands: grouped_gemm_tn.comp; the rest: gemm_coopmat2_nt.comp.
// Dispatch   x = ceil(m / block_m), y = ceil(n / block_n), z = groups.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat2.glsl"
#define GEMM_FORM 2
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat2_tn.kernel.glsl"

#include "include/gemm_coopmat2.glsl"

#include "include/gemm_coopmat_along.glsl"
