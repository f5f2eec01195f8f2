// SPDX-License-Identifier: MIT
// Storage of activations and weights: f32, or bf16 (the top half of an f32) packed two to a uint,
// the even element in the low half. Arithmetic is always f32; conversion to bf16 rounds to nearest
// even in integers, so it does not depend on a rounding mode. NaN stays NaN (quieted).
#ifndef BELLOWS_STORAGE_GLSL
#define BELLOWS_STORAGE_GLSL

#include "common.glsl"

// Untyped views of an address. Kernels declare their operands in the manifest and reinterpret them
// with these, keeping the declared access: Read* for what the kernel reads, Write* for the rest.
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer ReadFloat {
    float v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) readonly buffer ReadUint {
    uint v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 8) readonly buffer ReadUvec2 {
    uvec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer ReadUvec4 {
    uvec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) readonly buffer ReadVec4 {
    vec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer WriteFloat {
    float v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 4) buffer WriteUint {
    uint v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 8) buffer WriteUvec2 {
    uvec2 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer WriteUvec4 {
    uvec4 v[];
};
layout(buffer_reference, scalar, buffer_reference_align = 16) buffer WriteVec4 {
    vec4 v[];
};

// base + index * stride elements of (1 << log2_bytes) bytes each, in 64 bits.
uvec2 address_add(uvec2 base, uint index, uint stride, uint log2_bytes) {
    uint high, low, carry;
    umulExtended(index, stride, high, low);
    high = (high << log2_bytes) | (low >> (32u - log2_bytes));
    low = uaddCarry(base.x, low << log2_bytes, carry);
    return uvec2(low, base.y + high + carry);
}

float bf16_low(uint packed) {
    return uintBitsToFloat(packed << 16);
}

float bf16_high(uint packed) {
    return uintBitsToFloat(packed & 0xFFFF0000u);
}

// Element `index` of bf16 storage that starts at any multiple of 2 bytes.
float bf16_load(uvec2 base, uint index) {
    index += (base.x >> 1) & 1u;
    uint packed = ReadUint(uvec2(base.x & ~3u, base.y)).v[index >> 1];
    return uintBitsToFloat((index & 1u) != 0u ? packed & 0xFFFF0000u : packed << 16);
}

vec4 bf16_unpack(uvec2 packed) {
    return vec4(bf16_low(packed.x), bf16_high(packed.x), bf16_low(packed.y), bf16_high(packed.y));
}

// The bf16 code of x in the low 16 bits.
uint bf16_code(float x) {
    uint bits = floatBitsToUint(x);
    uint rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return (bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded;
}

uvec2 bf16_pack(vec4 x) {
    return uvec2(bf16_code(x.x) | (bf16_code(x.y) << 16), bf16_code(x.z) | (bf16_code(x.w) << 16));
}

#endif
