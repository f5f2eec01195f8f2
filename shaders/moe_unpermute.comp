// SPDX-License-Identifier: MIT
// Tokens from rows in expert order: out[t] = (out[t] +) sum over k ascending of
// (weights[t, k] *) rows[slot_to_row[t, k]], leaving out slots with -1; f32 sum.
//   rows [.., columns], out [tokens, columns] of the variant's storage,
//   slot_to_row [tokens, top_k] i32, weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a token.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_unpermute.kernel.glsl"
#include "include/rows.glsl"
#include "include/row_sums.glsl"

void main() {
    uvec2 rows = uvec2(push.operands.rows), tokens = uvec2(push.operands.out_tokens);
    uint step = column_step();
    FOR_ROWS(token, push.tokens) {
        uint to = token * push.units;
        for (uint first = column_first(); first < push.units; first += kAtOnce * step) {
            Sums sums = first_sums(push.accumulate != 0u, tokens, to, first, step, push.units);
            FOR_COUNTED(k, 0u, push.top_k) {
                uint slot = token * push.top_k + k;
                int row = push.operands.slot_to_row.v[slot];
                float weight = 1.0;
                if (push.has_weights != 0u) {
                    weight = push.operands.weights.v[slot];
                }
                if (row >= 0) {
                    add_row(sums, rows, uint(row) * push.units, first, step, push.units, weight);
                }
            } NEXT_COUNTED(k, push.top_k, 1u);
            store_sums(sums, tokens, to, first, step, push.units);
        }
    } NEXT_ROW(token, push.tokens);
}
