// SPDX-License-Identifier: MIT
// How the rows of a tensor are shared out, by the specialisation constant `local_size` and by
// `row_per_workgroup`, another or a constant, of the kernel that includes this after its header:
//   0: one invocation per row (CPU drivers: no barrier, no shared memory);
//   1: one workgroup per row, whose invocations take every local_size-th column.
// Loops over rows are grid-stride, so any grid serves any number of rows. Sums over a row have a
// fixed order in both forms: none depends on the subgroup size.
// Shared memory: 4 * local_size bytes in the second form.
#ifndef BELLOWS_ROWS_GLSL
#define BELLOWS_ROWS_GLSL

#include "common.glsl"

layout(local_size_x_id = 0) in;

shared float row_scratch[local_size];

uint row_first() {
    return row_per_workgroup != 0u ? gl_WorkGroupID.x
                                   : gl_WorkGroupID.x * local_size + gl_LocalInvocationIndex;
}
uint row_step() {
    return row_per_workgroup != 0u ? gl_NumWorkGroups.x : gl_NumWorkGroups.x * local_size;
}
uint column_first() {
    return row_per_workgroup != 0u ? gl_LocalInvocationIndex : 0u;
}
uint column_step() {
    return row_per_workgroup != 0u ? local_size : 1u;
}
// Loops over rows and columns: FOR_ROWS(row, rows) { … } NEXT_ROW(row, rows); and alike for columns.
#define FOR_ROWS(row, rows) FOR_COUNTED(row, row_first(), rows)
#define NEXT_ROW(row, rows) NEXT_COUNTED(row, rows, row_step())
#define FOR_COLUMNS(column, columns) FOR_COUNTED(column, column_first(), columns)
#define NEXT_COLUMN(column, columns) NEXT_COUNTED(column, columns, column_step())

// True for the one invocation that writes a row's scalars.
bool row_leader() {
    return row_per_workgroup == 0u || gl_LocalInvocationIndex == 0u;
}

// The sum, or the maximum, of x over the invocations of a row; all of them call it.
float row_sum(float x) {
    if (row_per_workgroup == 0u) {
        return x;
    }
    uint lane = gl_LocalInvocationIndex;
    row_scratch[lane] = x;
    barrier();
    for (uint width = local_size / 2u; width > 0u; width /= 2u) {
        if (lane < width) {
            row_scratch[lane] += row_scratch[lane + width];
        }
        barrier();
    }
    float sum = row_scratch[0];
    barrier();
    return sum;
}

float row_max(float x) {
    if (row_per_workgroup == 0u) {
        return x;
    }
    uint lane = gl_LocalInvocationIndex;
    row_scratch[lane] = x;
    barrier();
    for (uint width = local_size / 2u; width > 0u; width /= 2u) {
        if (lane < width) {
            row_scratch[lane] = max(row_scratch[lane], row_scratch[lane + width]);
        }
        barrier();
    }
    float most = row_scratch[0];
    barrier();
    return most;
}

#endif
