// SPDX-License-Identifier: MIT
// The results of a row's parts as one, in ascending order, by the logs of their sums; zeros for rows
// without any. Rows of one part have their result already. Operands: include/paged_attention.glsl.
// Dispatch: an invocation per segment of segment4 * 4 columns of a row and head, grid-stride. Where
// that is one four, the loads of several parts are under way at once (include/paged_parts.glsl). No
// shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "paged_attention_combine.kernel.glsl"
#include "include/paged_parts.glsl"

layout(local_size_x_id = 0) in;

const float kLn2 = 0.6931471805599453;

void store_lse(uint row, uint head, uint segment, float value) {
    if (push.has_lse != 0u && segment == 0u) {
        push.operands.lse.v[row * push.heads + head] = value;
    }
}

void main() {
    uint per_row = push.heads * push.segments, value4 = push.segments * push.segment4;
    uint items = push.rows * per_row;
    for (uint item = gl_GlobalInvocationID.x; item < items;
         item += gl_NumWorkGroups.x * local_size) {
        uint row = item / per_row, head = item % per_row / push.segments;
        uint segment = item % push.segments, first = segment * push.segment4;
        uint to = row * push.o_row4 + head * push.o_head4;
        uint partial = push.operands.parts.v[2u * row], count = push.operands.parts.v[2u * row + 1u];
        if (count == 0u) {
            for (uint c = first; c < first + push.segment4; ++c) {
                push.operands.o.v[to + c] = S4(0);
            }
            store_lse(row, head, segment, uintBitsToFloat(0x7F800000u));
        } else if (count > 1u && push.segment4 == 1u) {
            float lse;
            Parts parts = Parts(uvec2(push.operands.partial), uvec2(push.operands.partial_lse), partial,
                                count, push.heads, head, value4);
            push.operands.o.v[to + first] = store4(combine_parts(parts, first, lse));
            store_lse(row, head, segment, lse * kLn2);
        } else if (count > 1u) {
            float top = push.operands.partial_lse.v[partial * push.heads + head];
            for (uint i = 1u; i < count; ++i) {
                top = max(top, push.operands.partial_lse.v[(partial + i) * push.heads + head]);
            }
            float total = 0.0;
            for (uint i = 0u; i < count; ++i) {
                total += exp2(push.operands.partial_lse.v[(partial + i) * push.heads + head] - top);
            }
            float inverse = 1.0 / total;
            for (uint c = first; c < first + push.segment4; ++c) {
                vec4 sum = vec4(0.0);
                for (uint i = 0u; i < count; ++i) {
                    uint from = (partial + i) * push.heads + head;
                    vec4 x = push.operands.partial.v[from * value4 + c];
                    sum = fma(x, vec4(exp2(push.operands.partial_lse.v[from] - top)), sum);
                }
                push.operands.o.v[to + c] = store4(sum * inverse);
            }
            store_lse(row, head, segment, (top + log2(total)) * kLn2);
        }
    }
}
