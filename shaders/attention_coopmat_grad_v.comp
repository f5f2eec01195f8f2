// SPDX-License-Identifier: MIT
// Causal attention of bf16 on matrix units, gradient of the values. Formulas and operands:
// attention_backward_kv.comp; the rest: attention_coopmat_forward.comp, except that rows are keys
// and columns queries, those of the first head of a group first, and y = heads / group.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif

#include "include/storage.glsl"

#include "attention_coopmat_grad_v.kernel.glsl"

#define ROLE 3
#include "include/attention_coopmat.glsl"
