// SPDX-License-Identifier: MIT
// Dense GEMM on matrix units by whole workgroups, D = alpha * A * B (+ D); the rest:
// gemm_coopmat2_nt.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat2.glsl"
#define GEMM_FORM 1
#include "include/gemm_operands.glsl"

#include "gemm_coopmat2_nn.kernel.glsl"

#include "include/gemm_coopmat2.glsl"

#include "include/gemm_coopmat_dense.glsl"
