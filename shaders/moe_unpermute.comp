// SPDX-License-Identifier: MIT
// Tokens from rows in expert order: out[t] = (out[t] +) sum over k ascending of
// (weights[t, k] *) rows[slot_to_row[t, k]], leaving out slots with -1; f32 sum. (tree) That sum is
// exact, along a tree over the slots' experts (include/tree_sums.glsl), with an exchange's bits.
//   rows [.., columns], out [tokens, columns] of the variant's storage,
//   slot_to_row and (tree) topk_ids [tokens, top_k] i32, weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a token.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_unpermute.kernel.glsl"
#include "include/rows.glsl"
#include "include/row_sums.glsl"

int leaf_row(uint slot) {
    return push.operands.slot_to_row.v[slot];
}
uint leaf_expert(uint slot) {
    return uint(push.operands.topk_ids.v[slot]);
}
float leaf_weight(uint slot) {
    return push.has_weights != 0u ? push.operands.weights.v[slot] : 1.0;
}
Elements leaf(int row, uint unit) {
    return elements(read_unit(uvec2(push.operands.rows), uint(row) * push.units + unit));
}
#include "include/tree_sums.glsl"

// sums += what the token whose slots begin at `slot` has taken.
void add_tree_sums(inout Sums sums, uint slot, uint first, uint step) {
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        if (first + j * step < push.units) {
            sums.of[j] = both(sums.of[j], tree_sum(slot, first + j * step));
        }
    }
}

void main() {
    uvec2 rows = uvec2(push.operands.rows), tokens = uvec2(push.operands.out_tokens);
    uint step = column_step(), summed = tree > 0u ? 0u : push.top_k;
    FOR_ROWS(token, push.tokens) {
        uint to = token * push.units;
        take_leaves(token * push.top_k);
        for (uint first = column_first(); first < push.units; first += kAtOnce * step) {
            Sums sums = first_sums(push.accumulate != 0u, tokens, to, first, step, push.units);
            if (tree > 0u) {
                add_tree_sums(sums, token * push.top_k, first, step);
            }
            FOR_COUNTED(k, 0u, summed) {
                uint slot = token * push.top_k + k;
                int row = leaf_row(slot);
                float weight = leaf_weight(slot);
                if (row >= 0) {
                    add_row(sums, rows, uint(row) * push.units, first, step, push.units, weight);
                }
            } NEXT_COUNTED(k, summed, 1u);
            store_sums(sums, tokens, to, first, step, push.units);
        }
    } NEXT_ROW(token, push.tokens);
}
