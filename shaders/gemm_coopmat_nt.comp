// SPDX-License-Identifier: MIT
// Dense GEMM on matrix units, D = alpha * A * transpose(B) (+ D); also gemm_coopmat_nn, _tn.
// Operands, push fields and limits: gemm_nt.comp.
//
// Variants   <matrix element>_<type of a>_<type of b>_<type of d>. Operands are rounded to the
//            matrix element type as they are loaded: exact for bf16 storage in bf16 matrices and,
//            within 2^-14 .. 65504, in f16 matrices; f32 storage loses bits. Each matrix element
//            type is a numeric class of its own.
// Constants  a row that the device enumerates (f16 or bf16 -> f32, subgroup scope) as mma_m, mma_n,
//            mma_k, all multiples of 8; local_size = subgroup size * warps_m * warps_n; block_k a
//            multiple of mma_k; block_m = mma_m * fragments_m * warps_m, block_n likewise;
//            block_m * block_k / 8 and block_n * block_k / 8 are multiples of local_size.
//            Defaults are for 16x16x16 and subgroups of 32. For 8x8x8 and subgroups of 8 as on
//            lavapipe: local_size 32, fragments 2 x 2, warps 2 x 2, block_k 16.
// Dispatch   x = ceil(m / block_m), y = ceil(n / block_n), z = batches.
// Shared     see gemm_coopmat.glsl, 38 KiB by default; the caller keeps within the device's limit.
// Order      k ascends in steps of mma_k; inside a step it is the device's. Bits of an element do
//            not depend on m, n or the batch.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "gemm_coopmat_nt.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_dense.glsl"
