// SPDX-License-Identifier: MIT
// Rows in expert order from tokens: out[row] = x[slot / top_k] (* weights[slot]) for row =
// slot_to_row[slot]; zeros in the rows below row_count where row_to_slot is -1 (padding).
//   x [tokens, columns], out [rows, columns] of the variant's storage, row_to_slot [rows] i32,
//   slot_to_row and weights [tokens, top_k] i32 and f32, row_count [1] u32
// A token is read once and written to all its rows. Dispatch: include/rows.glsl over items: each
// token, then the rows, local_size of them to an item of a workgroup, to look for padding.
// Shared memory: 4 * local_size bytes, beside that of include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "moe_gather.kernel.glsl"
#include "include/row_units.glsl"
#include "include/rows.glsl"

const uint kAtOnce = 4u;

shared uint absent[local_size];

void spread(uvec2 x, uvec2 rows, uint token) {
    uint step = column_step(), from = token * push.units;
    for (uint first = column_first(); first < push.units; first += kAtOnce * step) {
        Unit units[kAtOnce];
        [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
            units[j] = kNothing;
            if (first + j * step < push.units) {
                units[j] = read_unit(x, from + first + j * step);
            }
        }
        FOR_COUNTED(k, 0u, push.top_k) {
            uint slot = token * push.top_k + k;
            int row = push.operands.slot_to_row.v[slot];
            float weight = 1.0;
            if (push.has_weights != 0u) {
                weight = push.operands.weights.v[slot];
            }
            uint to = uint(row) * push.units;
            [[unroll]] for (uint j = 0u; j < kAtOnce; ++j) {
                uint c = first + j * step;
                if (row >= 0 && c < push.units) {
                    Unit unit = units[j];
                    if (push.has_weights != 0u) {
                        Elements e = elements(unit);
                        unit = rounded(Elements(weight * e.low, weight * e.high));
                    }
                    write_unit(rows, to + c, unit);
                }
            }
        } NEXT_COUNTED(k, push.top_k, 1u);
    }
}

void clear(uvec2 rows, uint row) {
    FOR_COLUMNS(c, push.units) {
        write_unit(rows, row * push.units + c, kNothing);
    } NEXT_COLUMN(c, push.units);
}

bool is_padding(uint row, uint count) {
    return row < count && push.operands.row_to_slot.v[row] < 0;
}

void main() {
    uvec2 x = uvec2(push.operands.x), rows = uvec2(push.operands.out_rows);
    uint count = min(push.rows, push.operands.row_count.v[0]);
    uint each = row_per_workgroup != 0u ? local_size : 1u;
    FOR_ROWS(item, push.tokens + div_up(push.rows, each)) {
        if (item < push.tokens) {
            spread(x, rows, item);
        } else if (row_per_workgroup == 0u) {
            if (is_padding(item - push.tokens, count)) {
                clear(rows, item - push.tokens);
            }
        } else {
            uint first = (item - push.tokens) * local_size;
            absent[gl_LocalInvocationIndex] =
                is_padding(first + gl_LocalInvocationIndex, count) ? 1u : 0u;
            barrier();
            for (uint i = 0u; i < local_size; ++i) {
                if (absent[i] != 0u) {
                    clear(rows, first + i);
                }
            }
            barrier();
        }
    } NEXT_ROW(item, push.tokens + div_up(push.rows, each));
}
