// SPDX-License-Identifier: MIT
// What goes back to the sources: record i is the sum over k ascending of rows[slot_to_row[i, k]],
// leaving out -1 (f32 sum, rounded once to the records' storage), or (row_is_record) rows[i];
// (weighted) each row times slot_scalars[i, k]; and (has_scalars) slot_scalars[i, k]. (tree) Sums are
// exact, along a tree over slot_experts (include/tree_sums.glsl).
//   rows [.., columns] of the variant's storage, slot_to_row and slot_experts [records, top_k] i32,
//   slot_scalars [records, top_k] f32, record_count [1] u32; records, of the storage or, where the
//   variant says so, f32, and words are the same memory
// Dispatch: a workgroup per record (include/rows.glsl).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_reduce.kernel.glsl"
const uint row_per_workgroup = 1u;
#include "include/rows.glsl"
#include "include/row_sums.glsl"

int leaf_row(uint slot) {
    return push.operands.slot_to_row.v[slot];
}
uint leaf_expert(uint slot) {
    return uint(push.operands.slot_experts.v[slot]);
}
float leaf_weight(uint slot) {
    return push.weighted != 0u ? push.operands.slot_scalars.v[slot] : 1.0;
}
Elements leaf(int row, uint unit) {
    return elements(read_unit(uvec2(push.operands.rows), uint(row) * push.units + unit));
}
#include "include/tree_sums.glsl"

void store_tree_sums(uint record, uvec2 to) {
    take_leaves(record * push.top_k);
    for (uint unit = column_first(); unit < push.units; unit += column_step()) {
        store_record_elements(to, record * push.record_units + unit,
                              tree_sum(record * push.top_k, unit));
    }
}

void main() {
    uvec2 rows = uvec2(push.operands.rows), to = uvec2(push.operands.records);
    uint step = column_step();
    uint records = min(push.num_records, push.operands.record_count.v[0]);
    FOR_ROWS(record, records) {
        uint slot = record * push.top_k;
        bool exact = tree > 0u && push.row_is_record == 0u;
        if (exact) {
            store_tree_sums(record, to);
        }
        for (uint first = column_first(); !exact && first < push.units; first += kAtOnce * step) {
            Sums sums = first_sums(false, rows, 0u, first, step, push.units);
            if (push.row_is_record != 0u) {
                add_row(sums, rows, record * push.units, first, step, push.units, 1.0);
            } else {
                FOR_COUNTED(k, 0u, push.top_k) {
                    int row = push.operands.slot_to_row.v[slot + k];
                    if (row >= 0) {
                        add_row(sums, rows, uint(row) * push.units, first, step, push.units,
                                leaf_weight(slot + k));
                    }
                } NEXT_COUNTED(k, push.top_k, 1u);
            }
            store_record(sums, to, record * push.record_units, first, step, push.units);
        }
        if (push.has_scalars != 0u && row_leader()) {
            uint word = record * push.record_words + push.hidden_words;
            uint k = 0u;
            do {
                push.operands.words.v[word + k] =
                    floatBitsToUint(push.operands.slot_scalars.v[slot + k]);
            } while (++k < push.top_k);
        }
    } NEXT_ROW(record, records);
}
