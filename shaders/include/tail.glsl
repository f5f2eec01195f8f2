// SPDX-License-Identifier: MIT
// The last `count` (1..3) elements of a flat tensor whose length is not a multiple of 4, by the
// address of the whole tensor and the index of their group of four. Nothing behind the tensor is
// touched, except that an odd number of bf16 elements shares its last word with one more.
#ifndef BELLOWS_TAIL_GLSL
#define BELLOWS_TAIL_GLSL

#include "storage.glsl"

vec4 load_tail_f32(uvec2 base, uint index, uint count) {
    vec4 x = vec4(0);
    FOR_COUNTED(c, 0u, count) {
        x[c] = ReadFloat(base).v[4u * index + c];
    } NEXT_COUNTED(c, count, 1u);
    return x;
}

void store_tail_f32(uvec2 base, uint index, uint count, vec4 x) {
    for (uint c = 0u; c < count; ++c) {
        WriteFloat(base).v[4u * index + c] = x[c];
    }
}

vec4 load_tail_bf16(uvec2 base, uint index, uint count) {
    uvec2 packed = uvec2(ReadUint(base).v[2u * index], 0u);
    if (count > 2u) {
        packed.y = ReadUint(base).v[2u * index + 1u];
    }
    vec4 x = bf16_unpack(packed);
    for (uint c = count; c < 4u; ++c) {
        x[c] = 0.0;
    }
    return x;
}

void store_tail_bf16(uvec2 base, uint index, uint count, vec4 x) {
    uvec2 packed = bf16_pack(x);
    uint words = (count + 1u) / 2u;
    FOR_COUNTED(word, 0u, words) {
        uint kept = 2u * word + 1u < count ? 0u : 0xFFFF0000u;
        uint old = WriteUint(base).v[2u * index + word];
        WriteUint(base).v[2u * index + word] = (old & kept) | (packed[word] & ~kept);
    } NEXT_COUNTED(word, words, 1u);
}

#if STORAGE_BF16
#define load_tail load_tail_bf16
#define store_tail store_tail_bf16
#else
#define load_tail load_tail_f32
#define store_tail store_tail_f32
#endif

#endif
