// SPDX-License-Identifier: MIT
// Eight consecutive elements of a row, the unit of the quantisation kernels: 16 bytes of bf16, 32 of
// f32, 8 of codes. Rows of tensors may end anywhere; their memory goes on to a multiple of eight
// elements (codes: sixteen), whose values are not used and whose codes are written as 0.
// INPUT_F32, INPUT_BF16 or INPUT_FP8 as the variant says: Raw8 is what stands in memory.
#ifndef BELLOWS_FP8_EIGHT_GLSL
#define BELLOWS_FP8_EIGHT_GLSL

#include "fp8.glsl"
#include "words64.glsl"

#ifndef INPUT_F32
#define INPUT_F32 0
#endif
#ifndef INPUT_BF16
#define INPUT_BF16 0
#endif
#ifndef INPUT_FP8
#define INPUT_FP8 0
#endif

struct Eight {
    vec4 low;
    vec4 high;
};

// How many of the elements from 8 * group on are there, at most 8.
uint present(uint group, uint columns) {
    return columns > 8u * group ? min(columns - 8u * group, 8u) : 0u;
}

// Codes with those of absent elements set to 0.
uvec2 keep_present(uvec2 codes, uint count) {
    if (count >= 8u) {
        return codes;
    }
    uint low = count >= 4u ? 0xFFFFFFFFu : (1u << (8u * count)) - 1u;
    uint high = count > 4u ? (1u << (8u * (count - 4u))) - 1u : 0u;
    return codes & uvec2(low, high);
}

uint max4(uvec4 x) {
    return max(max(x.x, x.y), max(x.z, x.w));
}

uvec4 magnitude4(vec4 x) {
    return floatBitsToUint(x) & 0x7FFFFFFFu;
}

uint magnitude8(Eight x) {
    return max4(max(magnitude4(x.low), magnitude4(x.high)));
}

Eight scaled(Eight x, float factor) {
    return Eight(x.low * factor, x.high * factor);
}

// Values that bf16 holds without rounding.
uvec2 bf16_pack_exact(vec4 x) {
    uvec4 bits = floatBitsToUint(x);
    return uvec2((bits.x >> 16) | (bits.y & 0xFFFF0000u), (bits.z >> 16) | (bits.w & 0xFFFF0000u));
}

uvec4 bf16_pack_exact(Eight x) {
    return uvec4(bf16_pack_exact(x.low), bf16_pack_exact(x.high));
}

// Codes of elements of a block, of one that fits (fp8_block_fits) if `fits`.
uvec2 encode_block8(uint format, Eight x, float inverse, bool fits) {
    if (fits) {
        return uvec2(fp8_encode_fitting4(format, x.low, inverse),
                     fp8_encode_fitting4(format, x.high, inverse));
    }
    return uvec2(fp8_encode_any4(format, x.low, inverse),
                 fp8_encode_any4(format, x.high, inverse));
}

#if INPUT_BF16
#define X_ELEMENT uvec4
#define X_LOG2_BYTES 4u
#define Raw8 uvec4
const Raw8 kNothing8 = uvec4(0);
Raw8 read8(uvec2 base, uint at) {
    return read_uvec4(base, at);
}
Raw8 mask8(Raw8 raw, uint count) {
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        raw[i] &= 2u * i + 1u < count ? 0xFFFFFFFFu : (2u * i < count ? 0xFFFFu : 0u);
    }
    return raw;
}
Eight unpack8(Raw8 raw) {
    return Eight(bf16_unpack(raw.xy), bf16_unpack(raw.zw));
}
uint raw_magnitude8(Raw8 raw) {
    // The low half of a word shifted up beside the high half; what is below decides nothing.
    uvec4 most = max(raw << 17, raw << 1);
    return (max4(most) >> 1) & 0x7FFF0000u;
}
// Of the first of the eight alone.
uint raw_magnitude_of_first(Raw8 raw) {
    return (raw.x << 17) >> 1;
}
#elif INPUT_F32
#define X_ELEMENT vec4
#define X_LOG2_BYTES 5u
#define Raw8 Eight
const Raw8 kNothing8 = Eight(vec4(0), vec4(0));
Raw8 read8(uvec2 base, uint at) {
    return Eight(ReadVec4(base).v[2u * at], ReadVec4(base).v[2u * at + 1u]);
}
Raw8 mask8(Raw8 raw, uint count) {
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        raw.low[i] = i < count ? raw.low[i] : 0.0;
        raw.high[i] = i + 4u < count ? raw.high[i] : 0.0;
    }
    return raw;
}
Eight unpack8(Raw8 raw) {
    return raw;
}
uint raw_magnitude8(Raw8 raw) {
    return magnitude8(raw);
}
uint raw_magnitude_of_first(Raw8 raw) {
    return floatBitsToUint(raw.low.x) & 0x7FFFFFFFu;
}
#elif INPUT_FP8
#define X_ELEMENT uvec2
#define X_LOG2_BYTES 3u
#define Raw8 uvec2
const Raw8 kNothing8 = uvec2(0);
Raw8 read8(uvec2 base, uint at) {
    return ReadUvec2(base).v[at];
}
Raw8 mask8(Raw8 raw, uint count) {
    return keep_present(raw, count);
}
#endif

#if INPUT_BF16 || INPUT_F32 || INPUT_FP8
// Eight `group` of the row that begins at `row_at` (in eights), or the row's last one where it has no
// such: nothing branches, so loads follow one another, and a block's maximum stays what it is. Only
// elements of a last eight that are absent want clear8 before they are used.
Raw8 load8(uvec2 base, uint row_at, uint group, uint columns) {
    return read8(base, row_at + min(group, (columns - 1u) / 8u));
}

bool rows_end_within_eights(uint columns) {
    return columns % 8u != 0u;
}

// What load8 read, with absent elements set to 0.
Raw8 clear8(Raw8 raw, uint group, uint columns) {
    return mask8(raw, present(min(group, (columns - 1u) / 8u), columns));
}

Raw8 load_clear8(uvec2 base, uint row_at, uint group, uint columns) {
    Raw8 raw = load8(base, row_at, group, columns);
    return rows_end_within_eights(columns) ? clear8(raw, group, columns) : raw;
}
#endif

#endif
