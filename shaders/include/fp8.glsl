// SPDX-License-Identifier: MIT
// E4M3 and E5M2, four codes to a uint, the first in the low byte; scales of blocks. The bits are
// those of fp8/format.hpp and fp8/recipe.hpp. `format` is a specialisation constant everywhere:
// FP8_E4M3 or FP8_E5M2. No value that is not zero is ever an f32 subnormal, because drivers may
// flush those.
#ifndef BELLOWS_FP8_GLSL
#define BELLOWS_FP8_GLSL

#include "storage.glsl"

const uint FP8_E4M3 = 0u;
const uint FP8_E5M2 = 1u;

const uint FP8_POWER_OF_TWO = 0u;
const uint FP8_F32 = 1u;

const uint FP8_INFINITY = 0x7F800000u;
const uint FP8_NAN = 0x7FC00000u;
const uint FP8_NAN_CODES = 0x7F7F7F7Fu;

// One of bits 7, 15, 23 and 31 is set if one of the codes of E4M3 is NaN, none otherwise: adding one
// turns the top bit of the first NaN over, and carries to the next code from there on alone.
uint fp8_e4m3_nan_bits(uint codes) {
    return (codes + 0x01010101u) ^ codes;
}
uint fp8_e4m3_nan_bits(uvec4 codes) {
    return fp8_e4m3_nan_bits(codes.x) | fp8_e4m3_nan_bits(codes.y) | fp8_e4m3_nan_bits(codes.z) |
           fp8_e4m3_nan_bits(codes.w);
}

// A code's bits at the place of an f32's give `big`, right but for subnormal codes, for which 2 * big
// minus the least normal value is, which is larger otherwise; both are exact. NaN and infinities
// come out as the numbers that follow the largest.
uvec4 fp8_decode_finite_bits4(uint format, uvec4 top) {
    bool e4m3 = format == FP8_E4M3;
    uvec4 magnitude = (top & 0x7F000000u) >> (e4m3 ? 4u : 3u);
    precise vec4 big = uintBitsToFloat(magnitude + (e4m3 ? 0x3C000000u : 0x38000000u));
    precise vec4 small = fma(big, vec4(2.0), vec4(e4m3 ? -0.015625 : -0.00006103515625));
    return floatBitsToUint(min(big, small));
}

// Where no code is NaN or infinite.
vec4 fp8_decode_finite4(uint format, uint codes) {
    uvec4 top = uvec4(codes << 24, codes << 16, codes << 8, codes);
    return uintBitsToFloat(fp8_decode_finite_bits4(format, top) | (top & 0x80000000u));
}

vec4 fp8_decode4(uint format, uint codes) {
    uvec4 top = uvec4(codes << 24, codes << 16, codes << 8, codes);
    uvec4 bits = fp8_decode_finite_bits4(format, top), magnitude = top & 0x7F000000u;
    if (format == FP8_E4M3) {
        bits = mix(bits, uvec4(FP8_NAN), equal(magnitude, uvec4(0x7F000000u)));
    } else {
        bits = mix(bits, uvec4(FP8_INFINITY), equal(magnitude, uvec4(0x7C000000u)));
        bits = mix(bits, uvec4(FP8_NAN), greaterThan(magnitude, uvec4(0x7C000000u)));
    }
    return uintBitsToFloat(bits | (top & 0x80000000u));
}

// What values are multiplied by before they are coded: their exponents then count from 0 where
// fp8_code_lifted4 takes them, and a block's inverse scale can hold the factor.
float fp8_lift(uint format) {
    return uintBitsToFloat(format == FP8_E4M3 ? 0x49000000u : 0x5C800000u); // 2^19, 2^58
}

// The power of two below |x|, x lifted, but that of the format's least normal value where it is above.
vec4 fp8_power_below(uint format, vec4 x) {
    return uintBitsToFloat(max(floatBitsToUint(x) & FP8_INFINITY,
                               uvec4(format == FP8_E4M3 ? 0x46000000u : 0x55800000u)));
}

// Codes of |x| with the signs of `signs`, x lifted, |x| at most the format's largest value and not NaN.
// Adding 2^20 times the power of two below |x| (2^21 times for E5M2; exact, so fused or not) rounds
// |x| to the format's precision: the low bits of the sum count units in the last place, 8 to 16 of
// them (4 to 8), less for subnormals. The product moves them to the top byte and adds the sum's
// exponent, of which only the bits above that of the least normal value remain.
uint fp8_code_lifted4(uint format, vec4 x, uvec4 signs) {
    bool e4m3 = format == FP8_E4M3;
    precise vec4 sum = fma(fp8_power_below(format, x), vec4(e4m3 ? 1048576.0 : 2097152.0), abs(x));
    uvec4 code = floatBitsToUint(sum) * (e4m3 ? 0x01000010u : 0x01000008u) + (signs & 0x80000000u);
    uint high = (code.w >> 24 << 8) | (code.z >> 24); // shifts of two words
    uint low = (high << 8) | (code.y >> 24);
    return (low << 8) | (code.x >> 24);
}

// Codes of x, saturating, where x is not NaN (a NaN is taken for the largest value or for 0).
uint fp8_encode_finite4(uint format, vec4 x) {
    float lift = fp8_lift(format), most = format == FP8_E4M3 ? 448.0 : 57344.0;
    return fp8_code_lifted4(format, min(abs(x * lift), vec4(most * lift)), floatBitsToUint(x));
}

// The same with NaN kept, as the code 0x7F.
uint fp8_encode4(uint format, vec4 x) {
    uvec4 nan = mix(uvec4(0u), uvec4(0x7Fu),
                    greaterThan(floatBitsToUint(x) & 0x7FFFFFFFu, uvec4(FP8_INFINITY)));
    uint nans = (nan.x | (nan.y << 8)) | ((nan.z << 16) | (nan.w << 24));
    uint codes = fp8_encode_finite4(format, x);
    return (codes & ~(nans | (nans << 1))) | nans;
}

// Whether a block with this inverse scale holds neither a NaN nor anything that is above the
// format's largest value when scaled: only infinities, or nearly, are.
bool fp8_block_fits(uint format, float inverse) {
    return inverse > uintBitsToFloat(format == FP8_E4M3 ? 0x04800000u : 0x08000000u);
}

// Codes of x in a block that fits.
uint fp8_encode_fitting4(uint format, vec4 x, float inverse) {
    return fp8_code_lifted4(format, x * (inverse * fp8_lift(format)), floatBitsToUint(x));
}

uint fp8_encode_fitting4(uint format, vec4 x, vec4 inverse) {
    return fp8_code_lifted4(format, x * (inverse * fp8_lift(format)), floatBitsToUint(x));
}

// What takes the lift off again.
float fp8_lower(uint format) {
    return uintBitsToFloat(format == FP8_E4M3 ? 0x36000000u : 0x22800000u); // 2^-19, 2^-58
}

// code * scale of x in any block, without the codes: the same sum rounds, and what it had added to it
// goes again. inverse: times fp8_lift, scale: times fp8_lower. A block with a NaN has one for a scale.
vec4 fp8_round_lifted4(uint format, vec4 x, vec4 inverse, vec4 scale) {
    bool e4m3 = format == FP8_E4M3;
    float most = fp8_lift(format) * (e4m3 ? 448.0 : 57344.0);
    precise vec4 lifted = min(abs(x * inverse), vec4(most));
    precise vec4 added = fp8_power_below(format, lifted) * (e4m3 ? 1048576.0 : 2097152.0);
    precise vec4 sum = added + lifted;
    precise vec4 rounded = sum - added;
    precise vec4 magnitude = rounded * scale;
    return uintBitsToFloat(floatBitsToUint(magnitude) | floatBitsToUint(x) & 0x80000000u);
}

// Codes of x in any block.
uint fp8_encode_any4(uint format, vec4 x, float inverse) {
    bool poisoned = (floatBitsToUint(inverse) & 0x7FFFFFFFu) > FP8_INFINITY;
    float lift = fp8_lift(format), most = format == FP8_E4M3 ? 448.0 : 57344.0;
    vec4 magnitude = min(abs(x * (inverse * lift)), vec4(most * lift));
    uint codes = fp8_code_lifted4(format, magnitude, floatBitsToUint(x));
    return poisoned ? FP8_NAN_CODES : codes;
}

// The scale of a block by the bits of its largest |x|: recipe.hpp, block_scale().
float fp8_scale(uint format, uint rule, uint amax) {
    if (amax > FP8_INFINITY) {
        return uintBitsToFloat(FP8_NAN);
    }
    uint limited = clamp(amax, 0x38D1B717u, 0x7F7FFFFFu); // 1e-4, the largest f32
    if (rule == FP8_POWER_OF_TWO) {
        uint down = format == FP8_E4M3 ? 8u : 15u;
        return uintBitsToFloat(min(((limited + 0x1FFFFFu) >> 23) - down, 254u - down) << 23);
    }
    precise float scale =
        uintBitsToFloat(limited) * uintBitsToFloat(format == FP8_E4M3 ? 0x3B124925u : 0x37924925u);
    return scale;
}

// recipe.hpp, inverse_scale().
float fp8_inverse(uint rule, float scale) {
    uint bits = floatBitsToUint(scale);
    if ((bits & 0x7FFFFFFFu) > FP8_INFINITY) {
        return scale;
    }
    if (rule == FP8_POWER_OF_TWO) {
        return uintBitsToFloat(0x7F000000u - bits);
    }
    precise float inverse = uintBitsToFloat(0x7EF311C7u - bits);
    [[unroll]] for (int i = 0; i < 4; ++i) {
        precise float product = scale * inverse;
        precise float correction = 2.0 - product;
        inverse = inverse * correction;
    }
    return inverse;
}

// Sixteen codes of k from `first` on, those from `end` on as 0.
uvec4 fp8_before(uvec4 codes, uint first, uint end) {
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        uint begin = first + 4u * e;
        uint count = end > begin ? min(end - begin, 4u) : 0u;
        codes[e] &= count == 4u ? 0xFFFFFFFFu : (1u << 8u * count) - 1u;
    }
    return codes;
}

#endif
