// SPDX-License-Identifier: MIT
// Balancing without an auxiliary loss: bias[e] += rate * sign(mean load - counts[e]); sign(0) = 0.
// Compared in integers: counts[e] * experts against the total.
//   counts [experts] u32 (their total below 2^32), bias [experts] f32
// Dispatch: one invocation per expert. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "router_bias_update.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint expert = gl_GlobalInvocationID.x;
    if (expert >= push.experts) {
        return;
    }
    uint total = 0u;
    FOR_COUNTED(e, 0u, push.experts) {
        total += push.operands.counts.v[e];
    } NEXT_COUNTED(e, push.experts, 1u);
    uint high, low;
    umulExtended(push.operands.counts.v[expert], push.experts, high, low);
    float direction = high > 0u || low > total ? -1.0 : (low < total ? 1.0 : 0.0);
    push.operands.bias.v[expert] += push.rate * direction;
}
