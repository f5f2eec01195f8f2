// SPDX-License-Identifier: MIT
// Packed FP8 operands of a product: tiles of 128 rows (or columns, whatever is not summed over; x
// below) by 128 of the sum's depth k, zeros where there is nothing.
//
// codes   uvec4[tiles][blocks][4][256]: per tile and block of 128 k four steps of 32 k; per step 256
//         chunks of 16 codes (16 neighbours in k of one x), in the order in which a workgroup of the
//         product takes them: neighbours to neighbours, while what eight of them write to workgroup
//         memory, two units of 16 bytes each in rows of 80, falls on different banks.
// scales  uint[tiles][blocks][128], f32 bits of each x's scale in the block; NaN also where a code is
// peaks   uint[units][128], the largest of those over the sum; spread uint[units], the most powers of
//         two by which a scale of the tile falls below its x's peak
#ifndef BELLOWS_FP8_PACKED_GLSL
#define BELLOWS_FP8_PACKED_GLSL

const uint PACKED_STEP = 256u;   // chunks in a step
const uint PACKED_BLOCK = 1024u; // and in a block

// The chunk of a step that holds k = 16 * part .. of x (< 128).
uint packed_chunk(uint x, uint part) {
    return (x >> 4) * 32u | (x & 8u) << 1 | (x & 2u) << 2 | (x & 4u) | (x & 1u) << 1 | part;
}

// The inverse for x; the part is chunk % 2.
uint packed_x(uint chunk) {
    return (chunk >> 5) * 16u | (chunk & 16u) >> 1 | (chunk & 8u) >> 2 | (chunk & 4u) |
           (chunk & 2u) >> 1;
}

#endif
