// SPDX-License-Identifier: MIT
// Rows in expert order from tokens: out[row] = x[slot / top_k] (* weights[slot]) for row =
// slot_to_row[slot]; zeros in the rows below row_count where row_to_slot is -1 (padding).
//   x [tokens, columns], out [rows, columns] of the variant's storage, row_to_slot [rows] i32,
//   slot_to_row and weights [tokens, top_k] i32 and f32, row_count [1] u32
// spread_by_source 1: a token is read once and written to all its rows. Items: the rows,
//   local_size of them to an item of a workgroup, to look for padding, then each token.
// spread_by_source 0: rows one after the other (CPU drivers, which write better so). Items: rows.
// Dispatch: include/rows.glsl over items. Shared memory: include/row_spread.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_gather.kernel.glsl"
#include "include/rows.glsl"
#define SPREAD_WEIGHTED
#define SPREAD_CLEARS
#include "include/row_spread.glsl"

void by_tokens(uvec2 x, uvec2 rows, uint count) {
    uint clears = div_up(push.rows, kClearedRows), items = clears + push.tokens;
    FOR_ROWS(item, items) {
        if (item < clears) {
            clear_padding(rows, item, count);
        } else {
            spread(x, (item - clears) * push.units, rows, push.units, item - clears);
        }
    } NEXT_ROW(item, items);
}

void by_rows(uvec2 x, uvec2 rows, uint count) {
    FOR_ROWS(row, count) {
        int slot = push.operands.row_to_slot.v[row];
        uint from = uint(slot) / push.top_k * push.units, to = row * push.units;
        if (slot < 0) {
            clear_row(rows, row);
        } else if (push.has_weights == 0u) {
            FOR_COLUMNS(c, push.units) {
                write_unit(rows, to + c, read_unit(x, from + c));
            } NEXT_COLUMN(c, push.units);
        } else {
            float weight = push.operands.weights.v[slot];
            FOR_COLUMNS(c, push.units) {
                Elements e = elements(read_unit(x, from + c));
                write_unit(rows, to + c, rounded(Elements(weight * e.low, weight * e.high)));
            } NEXT_COLUMN(c, push.units);
        }
    } NEXT_ROW(row, count);
}

void main() {
    uvec2 x = uvec2(push.operands.x), rows = uvec2(push.operands.out_rows);
    uint count = min(push.rows, push.operands.row_count.v[0]);
    if (spread_by_source != 0u) {
        by_tokens(x, rows, count);
    } else {
        by_rows(x, rows, count);
    }
}
