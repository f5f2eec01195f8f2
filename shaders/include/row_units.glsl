// SPDX-License-Identifier: MIT
// Units of a row of f32 or bf16 (STORAGE_BF16): 16 bytes. Rows of bf16 that are no multiple of 16
// bytes long take units of 8. The kernel declares the constant wide: fours of elements in a unit.
#ifndef BELLOWS_ROW_UNITS_GLSL
#define BELLOWS_ROW_UNITS_GLSL

#include "words64.glsl"

// The elements of a unit; high is 0 where there are four.
struct Elements {
    vec4 low;
    vec4 high;
};

#if STORAGE_BF16
#define Unit uvec4
Unit read_unit(uvec2 base, uint at) {
    return wide == 2u ? read_uvec4(base, at) : uvec4(ReadUvec2(base).v[at], 0u, 0u);
}
void write_unit(uvec2 base, uint at, Unit unit) {
    if (wide == 2u) {
        write_uvec4(base, at, unit);
    } else {
        WriteUvec2(base).v[at] = unit.xy;
    }
}
Elements elements(Unit unit) {
    return Elements(bf16_unpack(unit.xy), wide == 2u ? bf16_unpack(unit.zw) : vec4(0));
}
Unit rounded(Elements x) {
    return uvec4(bf16_pack(x.low), wide == 2u ? bf16_pack(x.high) : uvec2(0));
}
// The same where a branch costs less than what it skips, as on GPUs: without NaN, which a sum shows,
// rounding takes half the arithmetic.
uint round_pair(float low, float high) {
    uvec2 bits = floatBitsToUint(vec2(low, high));
    bits += 0x7FFFu + ((bits >> 16) & 1u);
    return (bits.x >> 16) | (bits.y & 0xFFFF0000u);
}
Unit rounded_by_branch(Elements x) {
    vec4 sums = x.low + x.high;
    float sum = (sums.x + sums.y) + (sums.z + sums.w);
    if (isnan(sum)) {
        return rounded(x);
    }
    return uvec4(round_pair(x.low.x, x.low.y), round_pair(x.low.z, x.low.w),
                 round_pair(x.high.x, x.high.y), round_pair(x.high.z, x.high.w));
}
#else
#define Unit vec4
Unit read_unit(uvec2 base, uint at) {
    return ReadVec4(base).v[at];
}
void write_unit(uvec2 base, uint at, Unit unit) {
    WriteVec4(base).v[at] = unit;
}
Elements elements(Unit unit) {
    return Elements(unit, vec4(0));
}
Unit rounded(Elements x) {
    return x.low;
}
Unit rounded_by_branch(Elements x) {
    return x.low;
}
#endif

const Unit kNothing = Unit(0);

#endif
