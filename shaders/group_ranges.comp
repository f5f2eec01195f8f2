// SPDX-License-Identifier: MIT
// Where the rows of each group stand, from the ways in which others say it: group g owns rows
// begins[g] .. ends[g].
//   source  form 0  uint[groups], ends: groups begin at multiples of `spacing` rows, the first at 0,
//                   the others at the first one not below source[g - 1], and end before source[g]
//           form 1  uint[groups], counts: group g begins at row g * spacing and has
//                   min(source[g], spacing) rows
//           form 2  int[rows], each row's group; any other number for rows of none. A group's rows
//                   stand together. begins and ends are 0 before.
//   begins, ends  uint[groups] each. No row from `rows` on belongs to a group.
// Dispatch: one invocation per group, or row for form 2, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "group_ranges.kernel.glsl"

layout(local_size_x_id = 0) in;

void range_of_group(uint group) {
    uint begin = 0u;
    uint end = push.operands.source.v[group];
    if (form == 1u) {
        begin = group * push.spacing;
        end = begin + min(end, push.spacing);
    } else if (group > 0u) {
        begin = div_up(push.operands.source.v[group - 1u], push.spacing) * push.spacing;
    }
    end = min(end, push.rows);
    push.operands.begins.v[group] = begin;
    push.operands.ends.v[group] = max(begin, end);
}

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
    uint count = form == 2u ? push.rows : push.groups;
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += step) {
        if (form == 2u) {
            range_at_row(i);
        } else {
            range_of_group(i);
        }
    }
}
