// SPDX-License-Identifier: MIT
// out = silu(gate) * up (* row_weight), silu(g) = g * sigmoid(g).
//   gate_up [rows, 2 * ffn]: gate in the first ffn columns, up in the others; out [rows, ffn], both
//   of the variant's storage; row_weight [rows] f32; row_count: see include/row_counts.glsl
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/swiglu.glsl"
#include "swiglu_forward.kernel.glsl"
#include "include/row_counts.glsl"
#include "include/rows.glsl"

void compute_row(uint row) {
    uint gate_at = row * 2u * push.ffn4;
    uint up_at = gate_at + push.ffn4;
    float weight = 1.0;
    if (push.has_row_weight != 0u) {
        weight = push.operands.row_weight.v[row];
    }
    FOR_COLUMNS(c, push.ffn4) {
        vec4 gate = load4(push.operands.gate_up.v[gate_at + c]);
        vec4 up = load4(push.operands.gate_up.v[up_at + c]);
        push.operands.hidden.v[row * push.ffn4 + c] = store4(swiglu4(gate, up, weight));
    } NEXT_COLUMN(c, push.ffn4);
}

void main() {
    uint rows = end_of_rows();
    FOR_ROWS(row, rows) {
        if (row_is_there(row)) {
            compute_row(row);
        }
    } NEXT_ROW(row, rows);
}
