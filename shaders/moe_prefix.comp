// SPDX-License-Identifier: MIT
// Second step of the placement: block_counts[b, e] becomes the number of slots of expert e in the
// blocks before b, counts[e] its number in all of them.
//   block_counts [blocks, experts] u32, counts [experts] u32
// Dispatch: one invocation per expert. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_prefix.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint expert = gl_GlobalInvocationID.x;
    if (expert >= push.experts) {
        return;
    }
    uint sum = 0u;
    for (uint block = 0u; block < push.blocks; ++block) {
        uint index = block * push.experts + expert;
        uint count = push.operands.block_counts.v[index];
        push.operands.block_counts.v[index] = sum;
        sum += count;
    }
    push.operands.counts.v[expert] = sum;
}
