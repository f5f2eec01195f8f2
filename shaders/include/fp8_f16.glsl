// SPDX-License-Identifier: MIT
// E4M3 codes on matrix units of f16: a code moved to the bits of an f16 is its value times 2^-8,
// exactly. Needs f16 arithmetic (include/coopmat.glsl).
#ifndef BELLOWS_FP8_F16_GLSL
#define BELLOWS_FP8_F16_GLSL

const uint SPREAD = 22u; // powers of two that f16 holds below the first code's

// Four codes as f16 times 2^-8: the first and third, then the second and fourth.
uvec2 halves(uint codes) {
    return uvec2((codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u),
                 (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u));
}

uint times(uint pair, uint factor) {
    return packFloat2x16(unpackFloat2x16(pair) * unpackFloat2x16(factor));
}

// value * 2^exponent, where no step of it leaves the range unless the result does.
float raised(float value, int exponent) {
    int some = exponent >> 1;
    precise float x = value * uintBitsToFloat(uint(127 + some) << 23);
    x = x * uintBitsToFloat(uint(127 + exponent - some) << 23);
    return x;
}

#endif
