// SPDX-License-Identifier: MIT
// `wide` neighbouring fours of elements at once, in loads and stores of up to 16 bytes: 1, 2 or 4 (4:
// of bytes only). Offsets are in fours, multiples of `wide`. Included after fp8_four.glsl, whose values
// it then has, too, or activation.glsl, and the constant `wide`.
#ifndef BELLOWS_FP8_WIDE_GLSL
#define BELLOWS_FP8_WIDE_GLSL

#include "activation.glsl"

// Elements of the variant's storage.
#if STORAGE_BF16
void read_wide(uvec2 base, uint at, out S4 x[wide]) {
    if (wide == 2u) {
        uvec4 both = ReadUvec4(base).v[at / 2u];
        x[0] = both.xy;
        x[wide - 1u] = both.zw;
    } else {
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            x[w] = ReadUvec2(base).v[at + w];
        }
    }
}

void write_wide(uvec2 base, uint at, S4 x[wide]) {
    if (wide == 2u) {
        WriteUvec4(base).v[at / 2u] = uvec4(x[0], x[wide - 1u]);
    } else {
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            WriteUvec2(base).v[at + w] = x[w];
        }
    }
}
#else
void read_wide(uvec2 base, uint at, out S4 x[wide]) {
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        x[w] = ReadVec4(base).v[at + w];
    }
}

void write_wide(uvec2 base, uint at, S4 x[wide]) {
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        WriteVec4(base).v[at + w] = x[w];
    }
}
#endif

void read_codes(uvec2 base, uint at, out uint codes[wide]) {
    if (wide == 4u) {
        uvec4 all = ReadUvec4(base).v[at / 4u];
        codes[0] = all.x;
        codes[wide / 4u] = all.y;
        codes[wide / 2u] = all.z;
        codes[wide - 1u] = all.w;
    } else if (wide == 2u) {
        uvec2 both = ReadUvec2(base).v[at / 2u];
        codes[0] = both.x;
        codes[wide - 1u] = both.y;
    } else {
        codes[0] = ReadUint(base).v[at];
    }
}

#ifdef VALUE4
#if INPUT_F16
bool no_nan(Raw4 a[wide], Raw4 b[wide]) {
    uint nans = 0u;
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        nans |= fp8_e4m3_nan_bits(a[w].codes) | fp8_e4m3_nan_bits(b[w].codes);
    }
    return (nans & 0x80808080u) == 0u;
}
#endif

// What a and b hold.
void wide_values(Raw4 a[wide], Raw4 b[wide], out vec4 x[wide], out vec4 y[wide]) {
#if INPUT_F16
    if (input_format == FP8_E4M3 && no_nan(a, b)) {
        [[unroll]] for (uint w = 0u; w < wide; ++w) {
            x[w] = fp8_decode_by_pairs(a[w].codes) * a[w].scale;
            y[w] = fp8_decode_by_pairs(b[w].codes) * b[w].scale;
        }
        return;
    }
#endif
    [[unroll]] for (uint w = 0u; w < wide; ++w) {
        x[w] = VALUE4(a[w]);
        y[w] = VALUE4(b[w]);
    }
}
#endif

void write_codes(uvec2 base, uint at, uint codes[wide]) {
    if (wide == 4u) {
        WriteUvec4(base).v[at / 4u] =
            uvec4(codes[0], codes[wide / 4u], codes[wide / 2u], codes[wide - 1u]);
    } else if (wide == 2u) {
        WriteUvec2(base).v[at / 2u] = uvec2(codes[0], codes[wide - 1u]);
    } else {
        WriteUint(base).v[at] = codes[0];
    }
}

#endif
