// SPDX-License-Identifier: MIT
// What goes back to the sources: record i is the sum over k ascending of rows[slot_to_row[i, k]],
// leaving out -1 (f32 sum, rounded once to the records' storage), or (row_is_record) rows[i];
// (weighted) each row times slot_scalars[i, k]; and (has_scalars) slot_scalars[i, k]. (apart) No sum:
// the row of choice k is row k of the record; those of -1 are left as they are. (tree) Sums are
// exact, along a tree over slot_experts (include/tree_sums.glsl). (has_own) Those of this rank's own
// tokens, own_range = {first record, how many, where the first goes}, go where they come back to.
//   rows [.., columns] of the variant's storage, slot_to_row and slot_experts [records, top_k] i32,
//   slot_scalars [records, top_k] f32, record_count [1] and own_range [3] u32; records, of the
//   storage or, where the variant says so, f32, and words are the same memory, as are the own ones
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

void store_tree_sums(uint record, uvec2 to, uint place) {
    take_leaves(record * push.top_k);
    for (uint unit = column_first(); unit < push.units; unit += column_step()) {
        store_record_elements(to, place * push.record_units + unit,
                              tree_sum(record * push.top_k, unit));
    }
}

void store_rows_apart(uint slot, uvec2 rows, uvec2 to, uint place) {
    uint step = column_step();
    FOR_COUNTED(k, 0u, push.top_k) {
        int row = push.operands.slot_to_row.v[slot + k];
        for (uint first = column_first(); row >= 0 && first < push.units; first += kAtOnce * step) {
            Sums sums = first_sums(false, rows, 0u, first, step, push.units);
            add_row(sums, rows, uint(row) * push.units, first, step, push.units,
                    leaf_weight(slot + k));
            store_record(sums, to, place * push.record_units + k * push.units, first, step,
                         push.units);
        }
    } NEXT_COUNTED(k, push.top_k, 1u);
}

void store_scalars(uint slot, uint word, bool own) {
    uint k = 0u;
    do {
        uint bits = floatBitsToUint(push.operands.slot_scalars.v[slot + k]);
        if (own) {
            push.operands.own_words.v[word + k] = bits;
        } else {
            push.operands.words.v[word + k] = bits;
        }
    } while (++k < push.top_k);
}

void main() {
    uvec2 rows = uvec2(push.operands.rows);
    uint step = column_step();
    uint records = min(push.num_records, push.operands.record_count.v[0]);
    uint first_own = push.operands.own_range.v[0];
    uint num_own = push.has_own != 0u ? push.operands.own_range.v[1] : 0u;
    uint own_place = push.operands.own_range.v[2];
    FOR_ROWS(record, records) {
        uint slot = record * push.top_k;
        bool own = record - first_own < num_own; // below 0 it is very large
        uvec2 to = own ? uvec2(push.operands.own_records) : uvec2(push.operands.records);
        uint place = own ? own_place + (record - first_own) : record;
        bool exact = tree > 0u && push.row_is_record == 0u;
        if (exact) {
            store_tree_sums(record, to, place);
        }
        if (apart != 0u) {
            store_rows_apart(slot, rows, to, place);
        }
        bool summed = !exact && apart == 0u;
        for (uint first = column_first(); summed && first < push.units; first += kAtOnce * step) {
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
            store_record(sums, to, place * push.record_units, first, step, push.units);
        }
        if (push.has_scalars != 0u && row_leader()) {
            store_scalars(slot, place * push.record_words + push.hidden_words, own);
        }
    } NEXT_ROW(record, records);
}
