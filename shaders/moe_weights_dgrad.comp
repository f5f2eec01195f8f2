// SPDX-License-Identifier: MIT
// d_weights[t, k] = dot(rows[slot_to_row[t, k]], d_out[t]); 0 where the map says -1.
//   rows [.., columns], d_out [tokens, columns] of the variant's storage,
//   slot_to_row [tokens, top_k] i32, d_weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a slot.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_weights_dgrad.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(slot, push.slots) {
        int row = push.operands.slot_to_row.v[slot];
        vec4 sum = vec4(0);
        if (row >= 0) {
            uint a = uint(row) * push.columns4;
            uint b = slot / push.top_k * push.columns4;
            FOR_COLUMNS(c, push.columns4) {
                sum += load4(push.operands.rows.v[a + c]) * load4(push.operands.d_out.v[b + c]);
            } NEXT_COLUMN(c, push.columns4);
        }
        float total = row_sum(sum4(sum));
        if (row_leader()) {
            push.operands.d_weights.v[slot] = total;
        }
    } NEXT_ROW(slot, push.slots);
}
