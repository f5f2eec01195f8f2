// SPDX-License-Identifier: MIT
// sums[i] = sum over the i-th chunk of `chunk` values, ascending, as an unevaluated pair of f32
// (high, low) that carries about 48 bits: Knuth's exact two-sum per step.
//   values [count] f32, or pairs [count, 2] f32 if input_is_pairs; sums [chunks, 2] f32
// Dispatch: one invocation per chunk. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "sum_pairs.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint first = gl_GlobalInvocationID.x * push.chunk;
    if (first >= push.count) {
        return;
    }
    uint end = min(first + push.chunk, push.count);
    precise float high = 0.0;
    precise float low = 0.0;
    for (uint i = first; i < end; ++i) {
        float value;
        if (push.input_is_pairs != 0u) {
            value = push.operands.values.v[2u * i];
            low += push.operands.values.v[2u * i + 1u];
        } else {
            value = push.operands.values.v[i];
        }
        precise float sum = high + value;
        precise float rest = sum - high;
        precise float error = (high - (sum - rest)) + (value - rest);
        high = sum;
        low += error;
    }
    precise float total = high + low;
    precise float remainder = low - (total - high);
    push.operands.sums.v[2u * gl_GlobalInvocationID.x] = total;
    push.operands.sums.v[2u * gl_GlobalInvocationID.x + 1u] = remainder;
}
