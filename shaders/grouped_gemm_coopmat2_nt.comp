// SPDX-License-Identifier: MIT
// Grouped GEMM over rows on matrix units by whole workgroups: every row of A belongs to a group,
// every group has its own B. D[r] = alpha * A[r] * transpose(B[g]) (+ D[r]); operands:
// grouped_gemm_nt.comp, for a list of tiles that are block_m high. rows: of A. What stands in rows
// behind a group's end is read and not used. Variants, constants, order: gemm_coopmat2_nt.comp.
// Dispatch   indirect: x = number of tiles, y = ceil(n / block_n), z = 1.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat2.glsl"
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "grouped_gemm_coopmat2_nt.kernel.glsl"

#include "include/gemm_coopmat2.glsl"

#include "include/gemm_coopmat2_grouped.glsl"
