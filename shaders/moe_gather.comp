// SPDX-License-Identifier: MIT
// Rows in expert order from tokens: out[row] = x[slot / top_k] (* weights[slot]) with
// slot = row_to_slot[row]; zeros where that is -1 (padding).
//   x [tokens, columns], out [rows, columns] of the variant's storage, row_to_slot [rows] i32,
//   weights [tokens, top_k] f32, row_count [1] u32: number of rows that are there
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_gather.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    FOR_ROWS(row, rows) {
        int slot = push.operands.row_to_slot.v[row];
        uint to = row * push.columns4;
        if (slot < 0) {
            FOR_COLUMNS(c, push.columns4) {
                push.operands.out_rows.v[to + c] = S4(0);
            } NEXT_COLUMN(c, push.columns4);
        } else if (push.has_weights == 0u) {
            uint from = uint(slot) / push.top_k * push.columns4;
            FOR_COLUMNS(c, push.columns4) {
                push.operands.out_rows.v[to + c] = push.operands.x.v[from + c];
            } NEXT_COLUMN(c, push.columns4);
        } else {
            uint from = uint(slot) / push.top_k * push.columns4;
            float weight = push.operands.weights.v[slot];
            FOR_COLUMNS(c, push.columns4) {
                push.operands.out_rows.v[to + c] =
                    store4(weight * load4(push.operands.x.v[from + c]));
            } NEXT_COLUMN(c, push.columns4);
        }
    } NEXT_ROW(row, rows);
}
