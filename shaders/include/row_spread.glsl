// SPDX-License-Identifier: MIT
// A row that is read once and written to several places, and the rows that nobody writes: for kernels
// with the operands slot_to_row, [sources, top_k] i32 with -1 for "nowhere", and (SPREAD_WEIGHTED)
// weights, which push top_k, units and (SPREAD_WEIGHTED) has_weights, with the constants at_once: units
// that an invocation holds, and slots_at_once: slots whose rows and weights are loaded side by side.
// Dispatch: y = parts of a row, any number. Included after rows.glsl.
// Shared memory: 4 * local_size bytes, beside that of rows.glsl, with spread_by_source.
#ifndef BELLOWS_ROW_SPREAD_GLSL
#define BELLOWS_ROW_SPREAD_GLSL

#include "row_units.glsl"

#ifdef SPREAD_WEIGHTED
Unit weighted(Unit unit, float weight) {
    Elements e = elements(unit);
    return rounded_by_branch(Elements(weight * e.low, weight * e.high));
}
#endif

// Row `source`, at `from` in units of x, to the rows of its slots, to_stride units each. In the form
// with a workgroup per row this is part gl_WorkGroupID.y of gl_NumWorkGroups.y.
void spread(uvec2 x, uint from, uvec2 rows, uint to_stride, uint source) {
    uint step = column_step();
    for (uint first = gl_WorkGroupID.y * at_once * step + column_first(); first < push.units;
         first += gl_NumWorkGroups.y * at_once * step) {
        Unit units[at_once];
        [[unroll]] for (uint j = 0u; j < at_once; ++j) {
            units[j] = read_unit(x, from + min(first + j * step, push.units - 1u));
        }
        FOR_COUNTED(k, 0u, push.top_k) {
            int row[slots_at_once];
#ifdef SPREAD_WEIGHTED
            float weight[slots_at_once];
#endif
            [[unroll]] for (uint i = 0u; i < slots_at_once; ++i) {
                uint slot = source * push.top_k + min(k + i, push.top_k - 1u);
                row[i] = push.operands.slot_to_row.v[slot];
#ifdef SPREAD_WEIGHTED
                weight[i] = 1.0;
                if (push.has_weights != 0u) {
                    weight[i] = push.operands.weights.v[slot];
                }
#endif
            }
            [[unroll]] for (uint i = 0u; i < slots_at_once; ++i) {
                if (row[i] >= 0 && k + i < push.top_k) {
                    uint to = uint(row[i]) * to_stride;
                    [[unroll]] for (uint j = 0u; j < at_once; ++j) {
                        uint c = first + j * step;
                        if (c < push.units) {
                            Unit unit = units[j];
#ifdef SPREAD_WEIGHTED
                            if (push.has_weights != 0u) {
                                unit = weighted(unit, weight[i]);
                            }
#endif
                            write_unit(rows, to + c, unit);
                        }
                    }
                }
            }
        } NEXT_COUNTED(k, push.top_k, slots_at_once);
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
    for (uint i = gl_WorkGroupID.y; i < local_size; i += gl_NumWorkGroups.y) {
        if (absent[i] != 0u) {
            clear_row(rows, first + i);
        }
    }
    barrier();
}
#endif

#endif
