// SPDX-License-Identifier: MIT
// Gain gradient, first of two steps: partials[chunk] = sum of dy * x * inv_rms over the rows of
// the chunk in ascending order; column_sum.comp adds the chunks. Chunks have a fixed number of
// rows, so the sum does not depend on the device.
//   dy, x [rows, columns] with row strides, inv_rms [rows] f32, partials [chunks, columns] f32
// Dispatch: one invocation per chunk and four columns. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "rmsnorm_wgrad.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint chunk = gl_GlobalInvocationID.x / push.columns4;
    uint column = gl_GlobalInvocationID.x % push.columns4;
    uint first = chunk * push.chunk_rows;
    if (first >= push.rows) {
        return;
    }
    uint end = min(first + push.chunk_rows, push.rows);
    vec4 sum = vec4(0);
    FOR_COUNTED(row, first, end) {
        vec4 dy = load4(push.operands.dy.v[row * push.dy_stride4 + column]);
        vec4 x = load4(push.operands.x.v[row * push.x_stride4 + column]);
        sum += dy * (x * push.operands.inv_rms.v[row]);
    } NEXT_COUNTED(row, end, 1u);
    push.operands.partials.v[chunk * push.columns4 + column] = sum;
}
