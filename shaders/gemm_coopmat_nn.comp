// SPDX-License-Identifier: MIT
// Dense GEMM on matrix units, D = alpha * A * B (+ D); the rest: gemm_coopmat_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"

#include "gemm_coopmat_nn.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_dense.glsl"
