// SPDX-License-Identifier: MIT
// A token's entry in a paged cache (engine/ops/paged_attention.hpp): of its first part (the latent,
// or all heads' keys) and its second (the rotated key part, or all heads' values) four elements at a
// time. An entry begins at a multiple of 16 bytes. The kernel declares the constants
//   storage  0: f32, 1: bf16, 2: FP8, which is the first part as codes of E4M3, an f32 scale for each
//            128 of them, and the second part in bf16
//   first4   fours of the first part
#ifndef BELLOWS_PAGED_ENTRY_GLSL
#define BELLOWS_PAGED_ENTRY_GLSL

#include "fp8.glsl"

const uint kCacheBlock = 64u; // tokens

const uint kStoredF32 = 0u;
const uint kStoredBf16 = 1u;
const uint kStoredFp8 = 2u;

// Of FP8: words before the second part's four number `at` - first4.
uint second_part(uint at) {
    return first4 + first4 / 32u + 2u * (max(at, first4) - first4);
}

// Four elements, number `at` of the fours of both parts, where that is in the first. A block of codes
// with a NaN has one for a scale.
vec4 load_first_part(uvec2 entry, uint at) {
    if (storage == kStoredF32) {
        return ReadVec4(entry).v[at];
    }
    if (storage == kStoredBf16) {
        return bf16_unpack(ReadUvec2(entry).v[at]);
    }
    return fp8_decode_finite4(FP8_E4M3, ReadUint(entry).v[at]) *
           ReadFloat(entry).v[first4 + at / 32u];
}

// The same of any.
vec4 load_entry(uvec2 entry, uint at) {
    if (storage != kStoredFp8 || at < first4) {
        return load_first_part(entry, at);
    }
    uint word = second_part(at);
    return bf16_unpack(uvec2(ReadUint(entry).v[word], ReadUint(entry).v[word + 1u]));
}

// The same to store; of FP8 the second part alone.
void store_entry(uvec2 entry, uint at, vec4 x) {
    if (storage == kStoredF32) {
        WriteVec4(entry).v[at] = x;
    } else if (storage == kStoredBf16) {
        WriteUvec2(entry).v[at] = bf16_pack(x);
    } else {
        uvec2 packed = bf16_pack(x);
        uint word = second_part(at);
        WriteUint(entry).v[word] = packed.x;
        WriteUint(entry).v[word + 1u] = packed.y;
    }
}

#endif
