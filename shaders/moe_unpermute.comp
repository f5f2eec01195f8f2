// SPDX-License-Identifier: MIT
// Tokens from rows in expert order: out[t] = (out[t] +) sum over k ascending of
// (weights[t, k] *) rows[slot_to_row[t, k]], leaving out slots with -1; f32 sum. (tree) That sum is
// exact, along a tree over the slots' experts (include/tree_sums.glsl), with an exchange's bits.
//   rows [.., columns], out [tokens, columns] of the variant's storage,
//   slot_to_row and (tree) topk_ids [tokens, top_k] i32, weights [tokens, top_k] f32
// Dispatch: x as include/rows.glsl says; a row is a token. With `ahead` above 1 an invocation takes
// one unit of a token, at x * local_size + its number of y, and has the loads of so many rows under
// way at once; y = tokens (grid-stride).
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

// The sum of one unit, in the same order.
void sum_unit(uint token, uint unit) {
    uvec2 rows = uvec2(push.operands.rows), tokens = uvec2(push.operands.out_tokens);
    uint to = token * push.units + unit, first = token * push.top_k;
    Elements sum = Elements(vec4(0), vec4(0));
    if (push.accumulate != 0u) {
        sum = elements(read_unit(tokens, to));
    }
    if (tree > 0u) {
        take_leaves(first);
        sum = both(sum, tree_sum(first, unit));
    }
    for (uint k = tree > 0u ? push.top_k : 0u; k < push.top_k; k += ahead) {
        int row[ahead];
        float weight[ahead];
        [[unroll]] for (uint i = 0u; i < ahead; ++i) {
            uint slot = first + min(k + i, push.top_k - 1u);
            row[i] = push.operands.slot_to_row.v[slot];
            weight[i] = 1.0;
            if (push.has_weights != 0u) {
                weight[i] = push.operands.weights.v[slot];
            }
        }
        Unit read[ahead];
        [[unroll]] for (uint i = 0u; i < ahead; ++i) {
            read[i] = kNothing;
            if (k + i < push.top_k && row[i] >= 0) {
                read[i] = read_unit(rows, uint(row[i]) * push.units + unit);
            }
        }
        [[unroll]] for (uint i = 0u; i < ahead; ++i) {
            if (k + i < push.top_k && row[i] >= 0) {
                Elements e = elements(read[i]);
                sum.low += weight[i] * e.low;
                sum.high += weight[i] * e.high;
            }
        }
    }
    write_unit(tokens, to, rounded(sum));
}

void main() {
    if (ahead > 1u) {
        uint unit = gl_GlobalInvocationID.x;
        if (unit < push.units) {
            FOR_COUNTED(token, gl_WorkGroupID.y, push.tokens) {
                sum_unit(token, unit);
            } NEXT_COUNTED(token, push.tokens, gl_NumWorkGroups.y);
        }
        return;
    }
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
