// SPDX-License-Identifier: MIT
// Memory in words of 64 bits, where a variant says WORDS64=1. It is for CPU drivers, which compile
// loads and stores to gathers and scatters, word by word: one of 8 bytes takes as long as one of 4.
// Elsewhere the same in words of 32. The bits are the same in both.
#ifndef BELLOWS_WORDS64_GLSL
#define BELLOWS_WORDS64_GLSL

#include "storage.glsl"

#ifndef WORDS64
#define WORDS64 0
#endif

#if WORDS64
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require

layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer ReadWords64 {
    u64vec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer WriteWords64 {
    u64vec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer WriteWord64 {
    uint64_t v[];
};

uvec4 read_uvec4(uvec2 base, uint at) {
    u64vec2 words = ReadWords64(base).v[at];
    return uvec4(unpackUint2x32(words.x), unpackUint2x32(words.y));
}
void write_uvec4(uvec2 base, uint at, uvec4 value) {
    WriteWords64(base).v[at] = u64vec2(packUint2x32(value.xy), packUint2x32(value.zw));
}
void write_uvec2(uvec2 base, uint at, uvec2 value) {
    WriteWord64(base).v[at] = packUint2x32(value);
}
#else
uvec4 read_uvec4(uvec2 base, uint at) {
    return ReadUvec4(base).v[at];
}
void write_uvec4(uvec2 base, uint at, uvec4 value) {
    WriteUvec4(base).v[at] = value;
}
void write_uvec2(uvec2 base, uint at, uvec2 value) {
    WriteUvec2(base).v[at] = value;
}
#endif

#endif
