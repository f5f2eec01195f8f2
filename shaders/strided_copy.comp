// SPDX-License-Identifier: MIT
// y = x (+ y) for tensors of three dimensions with strides.
//   x, y [outer, inner, columns]
// Dispatch: see include/rows.glsl; a row is an (outer, inner).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "strided_copy.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(row, push.outer * push.inner) {
        uint x_at = row / push.inner * push.x_outer4 + row % push.inner * push.x_inner4;
        uint y_at = row / push.inner * push.y_outer4 + row % push.inner * push.y_inner4;
        FOR_COLUMNS(c, push.columns4) {
            if (push.accumulate != 0u) {
                vec4 sum = load4(push.operands.y.v[y_at + c]) + load4(push.operands.x.v[x_at + c]);
                push.operands.y.v[y_at + c] = store4(sum);
            } else {
                push.operands.y.v[y_at + c] = push.operands.x.v[x_at + c];
            }
        } NEXT_COLUMN(c, push.columns4);
    } NEXT_ROW(row, push.outer * push.inner);
}
