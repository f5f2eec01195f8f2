// SPDX-License-Identifier: MIT
// Rotary embedding of pairs (x[2i], x[2i+1]) by the angle of (position, i), or by its negative
// (the gradient): y[2i] = x[2i] cos - x[2i+1] sin, y[2i+1] = x[2i] sin + x[2i+1] cos.
// position = positions[token] where by_position, else first_position + token % seq.
//   x, y [tokens, heads, rope] with token and head strides, may be the same memory;
//   table [positions, rope / 2, 2] f32: cos, sin; positions [tokens] u32
// Dispatch: one invocation per segment of segment4 * 4 elements, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/rotary.glsl"
#include "rope.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint per_token = push.heads * push.segments;
    uint items = push.tokens * per_token;
    uint step = gl_NumWorkGroups.x * local_size;
    uint row4 = push.segments * push.segment4;
    for (uint item = gl_GlobalInvocationID.x; item < items; item += step) {
        uint token = item / per_token;
        uint head = item % per_token / push.segments;
        uint first = item % push.segments * push.segment4;
        uint x_at = token * push.x_token4 + head * push.x_head4;
        uint y_at = token * push.y_token4 + head * push.y_head4;
        uint position = push.first_position + token % push.seq;
        if (push.by_position != 0u) {
            position = push.operands.positions.v[token];
        }
        uint angles_at = position * row4;
        for (uint c = first; c < first + push.segment4; ++c) {
            vec4 angles = push.operands.table.v[angles_at + c];
            vec4 x = load4(push.operands.x.v[x_at + c]);
            vec2 sine = push.inverse != 0u ? -angles.yw : angles.yw;
            push.operands.y.v[y_at + c] = store4(rotated_by(x, angles.xz, sine));
        }
    }
}
