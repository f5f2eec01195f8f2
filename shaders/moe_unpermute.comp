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

void main() {
    uint step = column_step();
    FOR_ROWS(token, push.tokens) {
        uint to = token * push.columns4;
        // Four groups of columns at a time share the loads of the map.
        for (uint first = column_first(); first < push.columns4; first += 4u * step) {
            vec4 sum[4];
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                uint c = first + j * step;
                sum[j] = vec4(0);
                if (push.accumulate != 0u && c < push.columns4) {
                    sum[j] = load4(push.operands.out_tokens.v[to + c]);
                }
            }
            FOR_COUNTED(k, 0u, push.top_k) {
                uint slot = token * push.top_k + k;
                int row = push.operands.slot_to_row.v[slot];
                float weight = 1.0;
                if (push.has_weights != 0u) {
                    weight = push.operands.weights.v[slot];
                }
                uint from = uint(row) * push.columns4;
                [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                    uint c = first + j * step;
                    if (row >= 0 && c < push.columns4) {
                        sum[j] += weight * load4(push.operands.rows.v[from + c]);
                    }
                }
            } NEXT_COUNTED(k, push.top_k, 1u);
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                uint c = first + j * step;
                if (c < push.columns4) {
                    push.operands.out_tokens.v[to + c] = store4(sum[j]);
                }
            }
        }
    } NEXT_ROW(token, push.tokens);
}
