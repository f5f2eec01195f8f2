// SPDX-License-Identifier: MIT
// Gradients of out = silu(gate) * up * row_weight: include/swiglu.glsl.
//   d_out [rows, ffn], gate_up and d_gate_up [rows, 2 * ffn] of the variant's storage;
//   row_weight, d_row_weight [rows] f32, used if has_row_weight; row_count [1] u32
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/swiglu.glsl"
#include "swiglu_dgrad.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    FOR_ROWS(row, rows) {
        uint gate_at = row * 2u * push.ffn4;
        uint up_at = gate_at + push.ffn4;
        float weight = 1.0;
        if (push.has_row_weight != 0u) {
            weight = push.operands.row_weight.v[row];
        }
        vec4 d_weight = vec4(0);
        FOR_COLUMNS(c, push.ffn4) {
            vec4 gate = load4(push.operands.gate_up.v[gate_at + c]);
            vec4 up = load4(push.operands.gate_up.v[up_at + c]);
            vec4 d_out = load4(push.operands.d_out.v[row * push.ffn4 + c]);
            SwigluGradient gradient = swiglu_gradient4(gate, up, d_out, weight);
            d_weight = add_terms(d_weight, gradient.d_weight);
            push.operands.d_gate_up.v[gate_at + c] = store4(gradient.d_gate);
            push.operands.d_gate_up.v[up_at + c] = store4(gradient.d_up);
        } NEXT_COLUMN(c, push.ffn4);
        if (push.has_row_weight != 0u) {
            float sum = row_sum(sum4(d_weight));
            if (row_leader()) {
                push.operands.d_row_weight.v[row] = sum;
            }
        }
    } NEXT_ROW(row, rows);
}
