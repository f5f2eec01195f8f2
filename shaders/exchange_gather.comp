// SPDX-License-Identifier: MIT
// Rows in expert order from received records: out[row] = hidden of record row_to_slot[row] / top_k;
// zeros where row_to_slot is -1 (padding).
//   records as groups of four elements, row_to_slot [rows] i32, row_count [1] u32,
//   out_rows [rows, columns] of the variant's storage
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_gather.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint rows = min(push.rows, push.operands.row_count.v[0]);
    FOR_ROWS(row, rows) {
        int slot = push.operands.row_to_slot.v[row];
        uint to = row * push.columns4;
        if (slot < 0) {
            FOR_COLUMNS(c, push.columns4) {
                push.operands.out_rows.v[to + c] = S4(0);
            } NEXT_COLUMN(c, push.columns4);
        } else {
            uint from = uint(slot) / push.top_k * push.record4;
            FOR_COLUMNS(c, push.columns4) {
                push.operands.out_rows.v[to + c] = push.operands.records.v[from + c];
            } NEXT_COLUMN(c, push.columns4);
        }
    } NEXT_ROW(row, rows);
}
