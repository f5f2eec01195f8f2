// SPDX-License-Identifier: MIT
// What the members of a group brought, summed element by element in ascending order of the members:
//   sum[i] = (x_0[i] + x_1[i]) + x_2[i] ...   with x_self = own, the others from `staged`
//   own, sum, image [count]; staged [members - 1, stride], without this member's own row
// sum may be own. image (where has_image is 1) gets a copy of the sum. ELEMENT: float or vec4.
// Dispatch: any number of workgroups in x (grid-stride). No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "sum_ranks.kernel.glsl"

ELEMENT brought(uint member, uint i) {
    if (member == push.self) {
        return push.operands.own.v[i];
    }
    uint row = member < push.self ? member : member - 1u;
    return push.operands.staged.v[row * push.stride + i];
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint i = gl_GlobalInvocationID.x; i < push.count; i += step) {
        ELEMENT total = brought(0u, i);
        for (uint member = 1u; member < push.members; ++member) {
            total += brought(member, i);
        }
        push.operands.sum.v[i] = total;
        if (push.has_image != 0u) {
            push.operands.image.v[i] = total;
        }
    }
}
