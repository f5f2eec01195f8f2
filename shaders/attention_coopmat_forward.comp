// SPDX-License-Identifier: MIT
// Causal attention of bf16 on matrix units, forward; attention_coopmat_grad_q, _grad_k and _grad_v
// share this contract. Formulas, operands and layouts: attention_forward.comp. Scores and sums are
// f32, weights are rounded to the matrix type.
//
// Variants   bf16, f16: the elements of matrices; operands are bf16. As f16 they are exact within
//            2^-14 .. 65504 only.
// Constants  local_size  subgroup size * warps
//            mma_m, mma_n, mma_k  a row that the device enumerates (subgroup scope, f32 sums), all
//                        multiples of 8; the subgroup size is a multiple of mma_m
//            warps       subgroups, each with mma_m rows
//            block       columns at once: a multiple of mma_n, mma_k and 8 * subgroup size / mma_m
//            qk_dim, v_dim  head sizes, multiples of mma_n and mma_k
//            in_lane     1: weights stay in the invocations that hold their scores, as lane_* says
//                        (MatrixSlots, matrix_images.hpp); 0: they pass through workgroup memory
//            group       heads of q that share one of k and v; divides heads
//            by_document 1: attention stays within documents, as attention_forward.comp has them
// Limits     strides are multiples of eight elements, tensors start at multiples of 16 bytes.
// Dispatch   x = ceil(seq / (mma_m * warps)), y = heads, z = sequences.
// Order      columns ascend in blocks from the sequence's first; inside a block it is the device's.
//            A row's bits depend on nothing but its own q and the keys and values up to it.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif

#include "include/storage.glsl"

#include "attention_coopmat_forward.kernel.glsl"

#define ROLE 0
#include "include/attention_coopmat.glsl"
