// SPDX-License-Identifier: MIT
// Rows in expert order from received records: out[row] = hidden of record slot / top_k for row =
// slot_to_row[slot]; zeros in the rows below row_count where row_to_slot is -1 (padding).
//   records of record_units units each, row_to_slot [rows] and slot_to_row [records, top_k] i32,
//   row_count and record_count [1] u32, out_rows [rows, columns] of the variant's storage
// spread_by_source and dispatch: as in moe_gather.comp; a record for a token.
// Shared memory: include/row_spread.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_gather.kernel.glsl"
#include "include/rows.glsl"
#define SPREAD_CLEARS
#include "include/row_spread.glsl"

void by_records(uvec2 records, uvec2 rows, uint count) {
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

void by_rows(uvec2 records, uvec2 rows, uint count) {
    FOR_ROWS(row, count) {
        int slot = push.operands.row_to_slot.v[row];
        if (slot < 0) {
            clear_row(rows, row);
        } else {
            uint from = uint(slot) / push.top_k * push.record_units;
            FOR_COLUMNS(c, push.units) {
                write_unit(rows, row * push.units + c, read_unit(records, from + c));
            } NEXT_COLUMN(c, push.units);
        }
    } NEXT_ROW(row, count);
}

void main() {
    uvec2 records = uvec2(push.operands.records), rows = uvec2(push.operands.out_rows);
    uint count = min(push.rows, push.operands.row_count.v[0]);
    if (spread_by_source != 0u) {
        by_records(records, rows, count);
    } else {
        by_rows(records, rows, count);
    }
}
