// SPDX-License-Identifier: MIT
// What goes back to the sources: record i is the sum over k ascending of rows[slot_to_row[i, k]],
// leaving out -1 (f32 sum, rounded once to the storage), and (has_scalars) slot_scalars[i, k].
//   rows [.., columns] of the variant's storage, slot_to_row [records, top_k] i32, slot_scalars
//   [records, top_k] f32, record_count [1] u32; records and words are the same memory
// Dispatch: see include/rows.glsl; a row is a record.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_reduce.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint records = min(push.num_records, push.operands.record_count.v[0]);
    FOR_ROWS(record, records) {
        uint slot = record * push.top_k;
        FOR_COLUMNS(c, push.columns4) {
            vec4 sum = vec4(0);
            uint k = 0u;
            do {
                int row = push.operands.slot_to_row.v[slot + k];
                if (row >= 0) {
                    sum += load4(push.operands.rows.v[uint(row) * push.columns4 + c]);
                }
            } while (++k < push.top_k);
            push.operands.records.v[record * push.record4 + c] = store4(sum);
        } NEXT_COLUMN(c, push.columns4);
        if (push.has_scalars != 0u && row_leader()) {
            uint to = record * push.record_words + push.hidden_words;
            uint k = 0u;
            do {
                push.operands.words.v[to + k] =
                    floatBitsToUint(push.operands.slot_scalars.v[slot + k]);
            } while (++k < push.top_k);
        }
    } NEXT_ROW(record, records);
}
