// SPDX-License-Identifier: MIT
// y = x (+ y) for tensors of three dimensions with strides.
//   x, y [outer, inner, columns]
// Dispatch: by_units 0: an invocation per row, which is an (outer, inner); include/rows.glsl.
// by_units 1: an invocation takes units of `wide` fours, whichever rows they are of, so that short
// rows fill workgroups and few rows all cores; grid-stride. wide 2: bf16, whose rows begin at and
// are multiples of 16 bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "strided_copy.kernel.glsl"
const uint row_per_workgroup = 0u;
#include "include/row_units.glsl"
#include "include/rows.glsl"

// In fours.
uint place(uint row, uint outer4, uint inner4) {
    return row / push.inner * outer4 + row % push.inner * inner4;
}

void copy_rows() {
    FOR_ROWS(row, push.outer * push.inner) {
        uint x_at = place(row, push.x_outer4, push.x_inner4);
        uint y_at = place(row, push.y_outer4, push.y_inner4);
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

void copy_units() {
    uvec2 x = uvec2(push.operands.x), y = uvec2(push.operands.y);
    uint in_row = push.columns4 / wide, count = push.outer * push.inner * in_row;
    FOR_COUNTED(i, gl_GlobalInvocationID.x, count) {
        uint row = i / in_row, c = i % in_row;
        uint x_at = place(row, push.x_outer4, push.x_inner4) / wide + c;
        uint y_at = place(row, push.y_outer4, push.y_inner4) / wide + c;
        Unit unit = read_unit(x, x_at);
        if (push.accumulate != 0u) {
            Elements from = elements(unit), to = elements(read_unit(y, y_at));
            unit = rounded(Elements(to.low + from.low, to.high + from.high));
        }
        write_unit(y, y_at, unit);
    } NEXT_COUNTED(i, count, local_size * gl_NumWorkGroups.x);
}

void main() {
    if (by_units != 0u) {
        copy_units();
    } else {
        copy_rows();
    }
}
