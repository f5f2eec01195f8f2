// SPDX-License-Identifier: MIT
// Third step of the placement: offsets[e] = sum over f < e of counts[f] rounded up to `alignment`,
// the first row of expert e; offsets[experts] = number of rows in all.
//   counts [experts] u32, offsets [experts + 1] u32
// Dispatch: one invocation per entry of offsets. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_offsets.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint expert = gl_GlobalInvocationID.x;
    if (expert > push.experts) {
        return;
    }
    uint sum = 0u;
    FOR_COUNTED(e, 0u, expert) {
        sum += div_up(push.operands.counts.v[e], push.alignment) * push.alignment;
    } NEXT_COUNTED(e, expert, 1u);
    push.operands.offsets.v[expert] = sum;
}
