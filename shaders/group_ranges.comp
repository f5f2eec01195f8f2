// SPDX-License-Identifier: MIT
// Where the rows of each group stand, from each row's group: group g owns rows begins[g] .. ends[g].
//   source  int[rows], each row's group; any other number for rows of none. A group's rows stand
//           together.
//   begins, ends  uint[groups] each, 0 before
// Dispatch: one invocation per row, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "group_ranges.kernel.glsl"

layout(local_size_x_id = 0) in;

void range_at_row(uint row) {
    uint group = push.operands.source.v[row];
    if (group >= push.groups) {
        return;
    }
    bool first = row == 0u;
    if (!first) {
        first = push.operands.source.v[row - 1u] != group;
    }
    bool last = row + 1u == push.rows;
    if (!last) {
        last = push.operands.source.v[row + 1u] != group;
    }
    if (first) {
        push.operands.begins.v[group] = row;
    }
    if (last) {
        push.operands.ends.v[group] = row + 1u;
    }
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint row = gl_GlobalInvocationID.x; row < push.rows; row += step) {
        range_at_row(row);
    }
}
