// SPDX-License-Identifier: MIT
// Rows in expert order from received records: out[row] = hidden of record slot / top_k for row =
// slot_to_row[slot]; zeros in the rows below row_count where row_to_slot is -1 (padding).
//   records of record_units units each, row_to_slot [rows] and slot_to_row [records, top_k] i32,
//   row_count and record_count [1] u32, out_rows [rows, columns] of the variant's storage, or (bf16,
//   wide 2) rows of any 16 bytes
// Dispatch: a workgroup per record and per kClearedRows rows, which are looked through for padding
// (include/rows.glsl), y = parts of a row. Shared memory: include/row_spread.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_gather.kernel.glsl"
const uint row_per_workgroup = 1u, spread_by_source = 1u;
#include "include/rows.glsl"
#define SPREAD_CLEARS
#include "include/row_spread.glsl"

void main() {
    uvec2 records = uvec2(push.operands.records), rows = uvec2(push.operands.out_rows);
    uint count = min(push.rows, push.operands.row_count.v[0]);
    uint num_records = min(push.num_records, push.operands.record_count.v[0]);
    uint clears = div_up(count, kClearedRows), items = clears + num_records;
    FOR_ROWS(item, items) {
        if (item < clears) {
            clear_padding(rows, item, count);
        } else {
            uint record = item - clears;
            spread(records, record * push.record_units, rows, push.units, record);
        }
    } NEXT_ROW(item, items);
}
