// SPDX-License-Identifier: MIT
// tokens[t] = drawn[tokens[t] - kDrawnBefore] where tokens[t] names one of `drawn`: the tokens that
// the step before has drawn become those that this step computes. All others stay.
//   tokens [tokens] u32, drawn [num_drawn] u32
// Dispatch: one invocation per token, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "sample_take.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kDrawnBefore = 0x80000000u; // as in sampling.hpp

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint t = gl_GlobalInvocationID.x; t < push.num_tokens; t += step) {
        uint token = push.operands.tokens.v[t];
        if (token >= kDrawnBefore && token - kDrawnBefore < push.num_drawn)
            push.operands.tokens.v[t] = push.operands.drawn.v[token - kDrawnBefore];
    }
}
