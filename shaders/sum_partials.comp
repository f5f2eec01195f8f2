// SPDX-License-Identifier: MIT
// partials[i] = sum of x, or of x * x, over the i-th chunk of a flat tensor.
//   x [count], partials [chunks] f32
// Dispatch: see include/rows.glsl; a row is a chunk of chunk4 * 4 elements.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/tail.glsl"
#include "sum_partials.kernel.glsl"
#include "include/rows.glsl"

vec4 term(vec4 x) {
    return push.square != 0u ? x * x : x;
}

void main() {
    uint whole4 = push.count4;
    uint chunks = div_up(whole4 + (push.tail != 0u ? 1u : 0u), push.chunk4);
    FOR_ROWS(chunk, chunks) {
        uint first = chunk * push.chunk4;
        uint end = min(first + push.chunk4, whole4);
        vec4 sum = vec4(0);
        for (uint i = first + column_first(); i < end; i += column_step()) {
            sum += term(load4(push.operands.x.v[i]));
        }
        if (push.tail != 0u && chunk == chunks - 1u && row_leader()) {
            sum += term(load_tail(uvec2(push.operands.x), whole4, push.tail));
        }
        float total = row_sum(sum4(sum));
        if (row_leader()) {
            push.operands.partials.v[chunk] = total;
        }
    } NEXT_ROW(chunk, chunks);
}
