// SPDX-License-Identifier: MIT
// Four consecutive elements of an activation, f32 or bf16 as the variant's STORAGE_BF16 says: the
// element type S4 of operands and its conversions to and from vec4.
#ifndef BELLOWS_ACTIVATION_GLSL
#define BELLOWS_ACTIVATION_GLSL

#include "storage.glsl"

vec4 load4(vec4 stored) {
    return stored;
}
vec4 load4(uvec2 stored) {
    return bf16_unpack(stored);
}

#if STORAGE_BF16
#define S4 uvec2
S4 store4(vec4 x) {
    return bf16_pack(x);
}
#else
#define S4 vec4
S4 store4(vec4 x) {
    return x;
}
#endif

float sum4(vec4 x) {
    return (x.x + x.y) + (x.z + x.w);
}

#endif
