// SPDX-License-Identifier: MIT
// norm = sqrt(sum of squares), coefficient = min(1, max_norm / norm) (1 if max_norm is 0).
//   sum_squares [2] f32 (high, low); result [2] f32: coefficient, norm
// Dispatch: one invocation. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "clip_coefficient.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    if (gl_GlobalInvocationID.x > 0u) {
        return;
    }
    float norm = sqrt(push.operands.sum_squares.v[0] + push.operands.sum_squares.v[1]);
    bool clip = push.max_norm > 0.0 && norm > push.max_norm;
    push.operands.result.v[0] = clip ? push.max_norm / norm : 1.0;
    push.operands.result.v[1] = norm;
}
