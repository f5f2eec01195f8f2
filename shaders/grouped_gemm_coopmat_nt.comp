// SPDX-License-Identifier: MIT
// Grouped GEMM over rows on matrix units: every row of A belongs to a group, every group has its
// own B. D[r] = alpha * A[r] * transpose(B[g]) (+ D[r]); operands: grouped_gemm_nt.comp, for a list
// of tiles that are BLOCK_M high. Variants, constants, shared memory, order: gemm_coopmat_nt.comp.
// Dispatch   indirect: x = number of tiles, y = ceil(n / BLOCK_N), z = 1.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat_nt.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_grouped.glsl"
