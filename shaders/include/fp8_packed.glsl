// SPDX-License-Identifier: MIT
// Packed FP8 operands of a product: tiles of 128 rows (or columns, whatever is not summed over; x
// below) by 128 of the sum's depth k, zeros where there is nothing, as the very registers that
// matrices of the device's units have when they are loaded: a matrix is stored element by element as
// each invocation of a subgroup finds it (cooperative matrices leave open which that are), and
// restored so. The host has made sure that this works (matrix_images.hpp).
//
// A      f16, scaled: code * 2^(7 - distance), where distance says by how many powers of two the
//        block's scale lies below the peak of its x; 0 where the tile's spread exceeds SPREAD.
//        uvec4[tiles][blocks][4 steps][128 / mma_m][32 / mma_k][elements / 8][subgroup size],
//        of pairs of elements in_registers
// B      codes, the f16 code * 2^-8 of which take few instructions: of each four elements the first
//        two stand as they are in f16, the others in the bits that these leave free.
//        uvec4[tiles][blocks][4][128 / mma_n][32 / mma_k * elements / 16][subgroup size]
// factors of B, if its columns have scales of their own: 2^(15 - distance) in f16, of each of the b_slots
//        columns of which an invocation holds elements, element e of column COLUMN_SLOT(e); two in a
//        word. uint[tiles][blocks][128 / mma_n][FACTOR_WORDS][subgroup size]
// scales uint[tiles][blocks][128], f32 bits of each x's scale in the block; NaN also where a code is
// peaks  uint[units][128], the largest of those over the sum
// spread uint[units], the most powers of two by which a scale of the tile falls below its x's peak; of
//        A whose sum runs along its rows uint[units][4], of 32 rows each, and their scales and image are
//        as their own spread says
#ifndef BELLOWS_FP8_PACKED_GLSL
#define BELLOWS_FP8_PACKED_GLSL

#include "fp8.glsl"
#include "fp8_f16.glsl"

const uint TILE = 128u;
const uint SPREAD_ROWS = 32u;
const uint ROWS_BATCH = 0u, ROWS_LIST = 1u, ROWS_COUNTS = 2u; // RowsFrom of fp8/pack.hpp

// units of 16 bytes in a block of 128 k
const uint A_BLOCK = 2048u;
const uint B_BLOCK = 1024u;

#define ELEMENTS_A (mma_m * mma_k / subgroup)
#define ELEMENTS_B (mma_n * mma_k / subgroup)
#define DEPTHS (32u / mma_k) // matrices of a step along k
#define FACTOR_WORDS ((b_slots + 1u) / 2u)
// Where invocations hold no pattern of columns, each element is taken for one.
#define COLUMN_SLOT(e) (b_slots == ELEMENTS_B ? (e) : b_slot >> 4u * (e) & 15u)

// Pairs of neighbouring elements of a matrix A in the order of the registers that NVIDIA's driver
// gives them, so that it need not move what it loads; and back.
uvec4 in_registers(uvec4 pairs) {
    return pairs.xzyw;
}

// 2^(15 - distance), twice as f16; NaN for a NaN scale.
uint packed_factor(uint peak, uint scale) {
    uint code = (30u - min((peak - scale) >> 23, 30u)) << 10;
    code = scale > FP8_INFINITY ? 0x7E00u : code;
    return code | code << 16;
}

#endif
