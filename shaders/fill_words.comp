// SPDX-License-Identifier: MIT
// destination[i] = value for i in [0, num_words).
//   destination: [num_words] u32
// Dispatch: any number of workgroups in x (grid-stride). No shared memory.
#version 460
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_scalar_block_layout : require
#extension GL_GOOGLE_include_directive : require
#include "fill_words.kernel.glsl"

void main() {
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < push.num_words; i += step)
        push.operands.destination.v[i] = push.value;
}
