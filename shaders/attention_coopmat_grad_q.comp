// SPDX-License-Identifier: MIT
// Causal attention of bf16 on matrix units, gradient of the queries. Formulas and operands:
// attention_backward_q.comp; the rest: attention_coopmat_forward.comp.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif

#include "include/storage.glsl"

#include "attention_coopmat_grad_q.kernel.glsl"

#define ROLE 1
#include "include/attention_coopmat.glsl"
