// SPDX-License-Identifier: MIT
// destination = bf16(source), round to nearest even, NaN stays NaN; two elements per invocation.
//   source: [2 * num_pairs] f32; destination: [num_pairs] u32, the first element in the low half
// Dispatch: any number of workgroups in x (grid-stride). No shared memory.
#version 460
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_GOOGLE_include_directive : require
#include "cast_f32_bf16.kernel.glsl"

uint to_bf16(float x) {
    uint bits = floatBitsToUint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

void main() {
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < push.num_pairs; i += step) {
        vec2 x = push.operands.source.v[i];
        push.operands.destination.v[i] = to_bf16(x.x) | (to_bf16(x.y) << 16);
    }
}
