// SPDX-License-Identifier: MIT
// The end of a combine at the source: out[t] = (out[t] +) (first_bias[t] +) (second_bias[t] +) sum
// over k ascending of the record that came back for slot (t, k), one per rank; (tree) that sum is
// exact, along a tree over the slots' experts (include/tree_sums.glsl). And (has_scalars)
// scalars[t, k] = the returned scalar of slot k, which stands in the record of the rank that owns
// the slot's expert; 0 for no expert. per_choice 1: each slot has a record of its own; 2: it has row k
// of the record of its expert's owner.
//   records, words: the same memory, rows as sent, of the variant's storage or, where it says so,
//   f32; slot_to_row, topk_ids [tokens, top_k]
//   i32; token_count [1] u32; out_tokens [tokens, columns] of the variant's storage, out_units from
//   each other, as the biases, of which there are `biases`; scalars [tokens, top_k] f32
// Dispatch: a workgroup per token (include/rows.glsl).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_combine.kernel.glsl"
#include "include/exchange_tokens.glsl"
const uint row_per_workgroup = 1u;
#include "include/rows.glsl"
#include "include/row_sums.glsl"

const uint kRows = per_choice == 2u && tree > 0u ? tree : 1u; // side by side in a record

int leaf_row(uint slot) {
    int row = push.operands.slot_to_row.v[slot];
    return row < 0 ? row : row * int(kRows) + int(slot % kRows);
}
uint leaf_expert(uint slot) {
    return uint(push.operands.topk_ids.v[slot]);
}
float leaf_weight(uint slot) {
    return 1.0;
}
Elements leaf(int row, uint unit) {
    uint at = uint(row) / kRows * push.record_units + uint(row) % kRows * push.units;
    return record_elements(uvec2(push.operands.records), at + unit);
}
#include "include/tree_sums.glsl"

// sums += what came back for the token whose slots begin at `slot`.
void add_tree_sums(inout Sums sums, uint slot, uint first, uint step) {
    [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
        if (first + j * step < push.units) {
            sums.of[j] = both(sums.of[j], tree_sum(slot, first + j * step));
        }
    }
}

float returned_scalar(uint first, uint k) {
    int rank = destination(first + k);
    int found = -1;
    FOR_COUNTED(j, per_choice == 1u ? k : 0u, k + 1u) {
        int row = push.operands.slot_to_row.v[first + j];
        if (found < 0 && row >= 0 && destination(first + j) == rank) {
            found = row;
        }
    } NEXT_COUNTED(j, k + 1u, 1u);
    float returned = 0.0;
    if (rank >= 0 && found >= 0) {
        returned = uintBitsToFloat(
            push.operands.words.v[uint(found) * push.record_words + push.hidden_words + k]);
    }
    return returned;
}

void main() {
    uvec2 records = uvec2(push.operands.records), tokens = uvec2(push.operands.out_tokens);
    uint step = column_step(), count = num_tokens();
    uint summed = tree > 0u ? 0u : push.top_k;
    FOR_ROWS(token, count) {
        uint slot = token * push.top_k, to = token * push.out_units;
        take_leaves(slot);
        for (uint first = column_first(); first < push.units; first += kAtOnce * step) {
            Sums sums = first_sums(push.accumulate != 0u, tokens, to, first, step, push.units);
            if (push.biases > 0u) {
                add_row(sums, uvec2(push.operands.first_bias), to, first, step, push.units, 1.0);
            }
            if (push.biases > 1u) {
                add_row(sums, uvec2(push.operands.second_bias), to, first, step, push.units, 1.0);
            }
            if (tree > 0u) {
                add_tree_sums(sums, slot, first, step);
            }
            FOR_COUNTED(k, 0u, summed) {
                int row = push.operands.slot_to_row.v[slot + k];
                if (row >= 0) {
                    uint at = uint(row) * push.record_units + (per_choice == 2u ? k * push.units : 0u);
                    add_record(sums, records, at, first, step, push.units);
                }
            } NEXT_COUNTED(k, summed, 1u);
            store_sums(sums, tokens, to, first, step, push.units);
        }
        for (uint k = column_first(); push.has_scalars != 0u && k < push.top_k;
             k += column_step()) {
            push.operands.scalars.v[slot + k] = returned_scalar(slot, k);
        }
    } NEXT_ROW(token, count);
}
