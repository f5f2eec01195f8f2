// SPDX-License-Identifier: MIT
// A row that is read once and written to several places, and the rows that nobody writes: for kernels
// with the operands slot_to_row, [sources, top_k] i32 with -1 for "nowhere", and (SPREAD_WEIGHTED)
// weights, which push top_k, units and (SPREAD_WEIGHTED) has_weights. Included after rows.glsl.
// Shared memory: 4 * local_size bytes, beside that of rows.glsl, with spread_by_source.
#ifndef BELLOWS_ROW_SPREAD_GLSL
#define BELLOWS_ROW_SPREAD_GLSL

#include "row_units.glsl"

const uint kSpreadAtOnce = 4u;

// Row `source`, at `from` in units of x, to the rows of its slots, to_stride units each.
void spread(uvec2 x, uint from, uvec2 rows, uint to_stride, uint source) {
    uint step = column_step();
    for (uint first = column_first(); first < push.units; first += kSpreadAtOnce * step) {
        Unit units[kSpreadAtOnce];
        [[unroll]] for (uint j = 0u; j < kSpreadAtOnce; ++j) {
            units[j] = kNothing;
            if (first + j * step < push.units) {
                units[j] = read_unit(x, from + first + j * step);
            }
        }
        FOR_COUNTED(k, 0u, push.top_k) {
            uint slot = source * push.top_k + k;
            int row = push.operands.slot_to_row.v[slot];
#ifdef SPREAD_WEIGHTED
            float weight = 1.0;
            if (push.has_weights != 0u) {
                weight = push.operands.weights.v[slot];
            }
#endif
            uint to = uint(row) * to_stride;
            [[unroll]] for (uint j = 0u; j < kSpreadAtOnce; ++j) {
                uint c = first + j * step;
                if (row >= 0 && c < push.units) {
                    Unit unit = units[j];
#ifdef SPREAD_WEIGHTED
                    if (push.has_weights != 0u) {
                        Elements e = elements(unit);
                        unit = rounded(Elements(weight * e.low, weight * e.high));
                    }
#endif
                    write_unit(rows, to + c, unit);
                }
            }
        } NEXT_COUNTED(k, push.top_k, 1u);
    }
}

void clear_row(uvec2 rows, uint row) {
    FOR_COLUMNS(c, push.units) {
        write_unit(rows, row * push.units + c, kNothing);
    } NEXT_COLUMN(c, push.units);
}

#ifdef SPREAD_CLEARS
shared uint absent[spread_by_source != 0u ? local_size : 1u];

bool is_padding(uint row, uint count) {
    return row < count && push.operands.row_to_slot.v[row] < 0;
}

// Rows of an item of a grid over all rows, kClearedRows each.
const uint kClearedRows = row_per_workgroup != 0u ? local_size : 1u;

// Clears those of the rows [item * kClearedRows, ..) below count that row_to_slot calls padding.
// All invocations of a workgroup per row call it.
void clear_padding(uvec2 rows, uint item, uint count) {
    uint first = item * kClearedRows;
    if (row_per_workgroup == 0u) {
        if (is_padding(first, count)) {
            clear_row(rows, first);
        }
        return;
    }
    absent[gl_LocalInvocationIndex] = is_padding(first + gl_LocalInvocationIndex, count) ? 1u : 0u;
    barrier();
    for (uint i = 0u; i < local_size; ++i) {
        if (absent[i] != 0u) {
            clear_row(rows, first + i);
        }
    }
    barrier();
}
#endif

#endif
