// SPDX-License-Identifier: MIT
// Where the rows of each group stand and the work list of grouped products over them, from ends or
// counts. The list is grouped_gemm_tiles.comp's.
//   source  uint[groups]. by_count 0: ends; groups begin at multiples of `spacing` rows, the first at
//           0, the others at the first one not below source[g - 1], and end before source[g]. by_count
//           1: group g begins at row g * spacing and has min(source[g], spacing) rows.
//   group_begins, group_ends  uint[groups] each. No row from `rows` on belongs to a group.
// Dispatch  one workgroup. Shared 256 B.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "group_ranges_tiles.kernel.glsl"

#define GROUP_TILES_LOCAL_SIZE 64
layout(local_size_x = GROUP_TILES_LOCAL_SIZE) in;

uvec2 rows_of_group(uint group) {
    uint begin = 0u, end = push.operands.source.v[group];
    if (by_count != 0u) {
        begin = group * push.spacing;
        end = begin + min(end, push.spacing);
    } else if (group > 0u) {
        begin = div_up(push.operands.source.v[group - 1u], push.spacing) * push.spacing;
    }
    end = max(begin, min(end, push.rows));
    push.operands.group_begins.v[group] = begin;
    push.operands.group_ends.v[group] = end;
    return uvec2(begin, end);
}

#include "include/group_tiles.glsl"

void main() {
    write_all_groups();
}
