// SPDX-License-Identifier: MIT
// E4M3 magnitudes as pairs of f16, four codes at a time: the first and third, and the second and
// fourth; no code is NaN. Needs f16 arithmetic. No value that decides a code is ever an f16 subnormal.
#ifndef BELLOWS_FP8_PAIRS_GLSL
#define BELLOWS_FP8_PAIRS_GLSL

#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require

// As fp8_decode_finite_bits4: a code's bits at the place of an f16's are right but for subnormal
// codes, for which twice the number minus the least normal value is, which is larger otherwise.
f16vec2 fp8_decode_pair(uint bits) {
    precise f16vec2 big = unpackFloat2x16(bits);
    precise f16vec2 small = fma(big, f16vec2(2.0), f16vec2(-0.015625));
    return min(big, small);
}

void fp8_decode_pairs(uint codes, out f16vec2 even, out f16vec2 odd) {
    even = fp8_decode_pair((codes & 0x007F007Fu) * 128u + 0x20002000u);
    odd = fp8_decode_pair((codes >> 1 & 0x3F803F80u) + 0x20002000u);
}

// The same with signs, in order.
vec4 fp8_decode_by_pairs(uint codes) {
    f16vec2 even, odd;
    fp8_decode_pairs(codes, even, odd);
    even = unpackFloat2x16(packFloat2x16(even) | (codes << 8 & 0x80008000u));
    odd = unpackFloat2x16(packFloat2x16(odd) | (codes & 0x80008000u));
    return vec4(even.x, odd.x, even.y, odd.y);
}

// What stands for x in f16's bits as its code does in a byte, with 64 more: x itself where its code is
// normal; otherwise 2^-7 + x / 2, rounded as the code is by the sum with 1 (whose last place is
// 2^-10), which is smaller than a normal x. x has four significant bits, so that all but that sum is
// exact, and what f16 may take for 0 is far below 2^-10, where codes are 0.
uint fp8_code_bits(f16vec2 x) {
    precise f16vec2 sum = fma(x, f16vec2(0.5), f16vec2(1.0));
    precise f16vec2 small = sum - f16vec2(0.9921875);
    return packFloat2x16(max(x, small));
}

// What the code of x stands for: as above, but a subnormal one's sum is taken back and doubled.
f16vec2 fp8_round_pair(f16vec2 x) {
    precise f16vec2 sum = fma(x, f16vec2(0.5), f16vec2(1.0));
    precise f16vec2 small = (sum - f16vec2(1.0)) * f16vec2(2.0);
    return mix(small, x, greaterThanEqual(x, f16vec2(0.015625)));
}

// Codes of |x|, which are 448 at most and have no more bits than a normal code.
uint fp8_encode_pairs(f16vec2 even, f16vec2 odd) {
    return (fp8_code_bits(even) >> 7) + (fp8_code_bits(odd) << 1) - 0x40404040u;
}

#endif
