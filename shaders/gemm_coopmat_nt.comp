// SPDX-License-Identifier: MIT
// Dense GEMM of bf16 operands on matrix units, D = alpha * A * transpose(B) (+ D); gemm_coopmat_nn
// and gemm_coopmat_tn share this contract. Operands, push fields and limits: gemm_nt.comp.
//
// Variants   <matrix element>_<type of d>. bf16 operands are what bf16 matrices take. As f16 they
//            are exact within 2^-14 .. 65504 only: overflow becomes infinite, so nothing chooses
//            these variants by itself. Each matrix element type and depth is a numeric class.
// Constants  mma_m, mma_n, mma_k   a row that the device enumerates (subgroup scope, f32 sums), all
//                       multiples of 8
//            fragments_*, warps_*  matrices per subgroup and subgroups along m and n
//            local_size  subgroup size * warps_m * warps_n
//            block_k     depth staged at once, a multiple of mma_k
//            stages      staged blocks: 1, or 2 to read one while the other is written
//            turn        1: where memory has k as its rows (b of nn and tn, a of tn), turn the block
//                        while staging it; 0: the matrix units' loads do
//            band        rows of tiles that run together
//            aligned     1 if a, b start at multiples of 16 bytes, d at four elements' bytes, and n,
//                        every leading dimension and stride, and for nt and nn k, for tn m, are
//                        multiples of 8. 0 serves everything, slower, same bits.
//            A block's octets, BLOCK_M * block_k / 8 and BLOCK_N * block_k / 8, are multiples of
//            local_size, or of twice that where they are turned. bellows::GemmTile has them all.
// Dispatch   x = ceil(m / BLOCK_M), y = ceil(n / BLOCK_N), z = batches.
// Shared     see gemm_coopmat.glsl; the caller keeps within the device's limit.
// Order      k ascends in steps of mma_k; inside a step it is the device's. Bits of an element do
//            not depend on m, n, the batch or any constant but mma_k.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#define GEMM_FORM 0
#include "include/gemm_operands.glsl"

#include "gemm_coopmat_nt.kernel.glsl"

#include "include/gemm_coopmat.glsl"

#include "include/gemm_coopmat_dense.glsl"
