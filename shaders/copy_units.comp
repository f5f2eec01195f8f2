// SPDX-License-Identifier: MIT
// destination[i] = source[i] for i in [0, units), 16 bytes each.
// Dispatch: an invocation per AT_ONCE units, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "copy_units.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint AT_ONCE = 4u; // loads that do not wait for each other

void main() {
    uint step = AT_ONCE * local_size;
    for (uint first = gl_WorkGroupID.x * step + gl_LocalInvocationIndex; first < push.units;
         first += gl_NumWorkGroups.x * step) {
        uvec4 units[AT_ONCE];
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            units[i] = push.operands.source.v[min(first + i * local_size, push.units - 1u)];
        }
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            if (first + i * local_size < push.units) {
                push.operands.destination.v[first + i * local_size] = units[i];
            }
        }
    }
}
