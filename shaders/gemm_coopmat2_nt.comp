// SPDX-License-Identifier: MIT
// Dense GEMM of bf16 operands on matrix units that a whole workgroup multiplies with,
// D = alpha * A * transpose(B) (+ D); gemm_coopmat2_nn and gemm_coopmat2_tn share this contract.
// Operands, push fields and limits: gemm_nt.comp. On top of that a and b start at multiples of 16
// bytes, d at eight elements' bytes, and n, every leading dimension and stride, and for nt and nn k,
// for tn m, are multiples of 8.
//
// Variants   <type of d>
// Constants  local_size, block_m, block_n, block_k   what the device enumerates
//                       (VkCooperativeMatrixFlexibleDimensionsPropertiesNV): bf16 with f32 sums for
//                       workgroups of local_size, sizes that its granularity divides;
//                       bellows::detail::WorkgroupTile
//            band        rows of tiles that run together
//            edges       0 if m, n and k are multiples of the tile's sizes; 1 serves everything
//            adds        0 if accumulate is 0: no registers for what D holds; 1 serves everything
// Dispatch   x = ceil(m / block_m), y = ceil(n / block_n), z = batches.
// Order      k ascends in steps of block_k; inside a step it is the device's. Bits of an element do
//            not depend on m, n, the batch, block_m, block_n, band, edges or adds.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat2.glsl"
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "gemm_coopmat2_nt.kernel.glsl"

#include "include/gemm_coopmat2.glsl"

#include "include/gemm_coopmat_dense.glsl"
