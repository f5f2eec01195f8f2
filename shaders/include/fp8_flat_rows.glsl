// SPDX-License-Identifier: MIT
// How eights of elements of rows are shared out where none depends on another: local_size / lanes_x
// rows side by side, lanes_x eights of each; kFlatSteps such steps are loaded before the first is
// stored. The kernel declares the constants local_size and lanes_x.
// Dispatch: x = ceil(rows / (kFlatSteps * local_size / lanes_x)) or less (grid-stride), y = ceil(eights
// of a row / lanes_x).
#ifndef BELLOWS_FP8_FLAT_ROWS_GLSL
#define BELLOWS_FP8_FLAT_ROWS_GLSL

#include "common.glsl"

layout(local_size_x_id = 0) in;

const uint kFlatSteps = 4u;
const uint flat_step_rows = local_size / lanes_x;
const uint flat_tile_rows = kFlatSteps * flat_step_rows;

uint flat_group() {
    return gl_WorkGroupID.y * lanes_x + gl_LocalInvocationIndex % lanes_x;
}
uint flat_row(uint first, uint i) {
    return first + i * flat_step_rows + gl_LocalInvocationIndex / lanes_x;
}

#define FOR_FLAT_ROWS(first, rows) FOR_COUNTED(first, gl_WorkGroupID.x * flat_tile_rows, rows)
#define NEXT_FLAT_ROWS(first, rows) NEXT_COUNTED(first, rows, gl_NumWorkGroups.x * flat_tile_rows)

#endif
