// SPDX-License-Identifier: MIT
// Transposing bytes in registers.
#ifndef BELLOWS_FP8_TURN_GLSL
#define BELLOWS_FP8_TURN_GLSL

// Four rows of four bytes, a row in a word, as the words of their four columns.
uvec4 turn4(uvec4 rows) {
    const uint kEven = 0x00FF00FFu, kLow = 0xFFFFu;
    uvec2 even = (rows.xz & kEven) | (rows.yw & kEven) << 8;
    uvec2 odd = (rows.xz >> 8 & kEven) | (rows.yw & ~kEven);
    return uvec4((even.x & kLow) | even.y << 16, (odd.x & kLow) | odd.y << 16,
                 even.x >> 16 | (even.y & ~kLow), odd.x >> 16 | (odd.y & ~kLow));
}

#endif
