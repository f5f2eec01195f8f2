// SPDX-License-Identifier: MIT
// sums[c] = (sums[c] +) sum over rows ascending of x[row, c].
//   x [rows, columns] f32, sums [columns] f32
// Dispatch: one invocation per four columns. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "column_sum.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint column = gl_GlobalInvocationID.x;
    if (column >= push.columns4) {
        return;
    }
    vec4 sum = vec4(0);
    for (uint row = 0u; row < push.rows; ++row) {
        sum += push.operands.x.v[row * push.columns4 + column];
    }
    if (push.accumulate != 0u) {
        sum += push.operands.sums.v[column];
    }
    push.operands.sums.v[column] = sum;
}
