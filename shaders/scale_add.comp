// SPDX-License-Identifier: MIT
// y = alpha * a (+ beta * b), element by element; y may be a or b.
//   a, b, y [count]
// Dispatch: see include/flat.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/tail.glsl"
#include "scale_add.kernel.glsl"
#include "include/flat.glsl"

void main() {
    FOR_FLAT(i, push.count4) {
        vec4 y = push.alpha * load4(push.operands.a.v[i]);
        if (push.has_b != 0u) {
            y += push.beta * load4(push.operands.b.v[i]);
        }
        push.operands.y.v[i] = store4(y);
    } END_FLAT
    if (push.tail != 0u && gl_GlobalInvocationID.x == 0u) {
        vec4 y = push.alpha * load_tail(uvec2(push.operands.a), push.count4, push.tail);
        if (push.has_b != 0u) {
            y += push.beta * load_tail(uvec2(push.operands.b), push.count4, push.tail);
        }
        store_tail(uvec2(push.operands.y), push.count4, push.tail, y);
    }
}
