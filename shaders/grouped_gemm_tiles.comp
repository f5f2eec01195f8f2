// SPDX-License-Identifier: MIT
// The work list of a grouped GEMM, made on the device from row counts that the host does not know.
//
// group_begins, group_ends  uint[groups] each: group g owns rows group_begins[g] .. group_ends[g]
// tiles          per tile two uints: group, first row. Tile t of group g starts at
//                group_begins[g] + t * tile_rows; groups and their rows ascend, empty groups have
//                none. Room for floor(most rows / tile_rows) + groups tiles.
// arguments      two times four grids of three uints for indirect dispatch: (number of tiles,
//                columns<i>, 1), then (number of tiles, ceil(columns<i> / wide), 1). columns<i> is
//                what the caller needs as y for its i-th shape, ceil(n / 32); wide is the width of
//                the tiles of other kernels over the same list, in units of 32.
// tile_rows      rows of the tiles of the GEMM that will read the list
// Dispatch       one workgroup. Shared 256 B.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "grouped_gemm_tiles.kernel.glsl"

#define GROUP_TILES_LOCAL_SIZE 64
layout(local_size_x = GROUP_TILES_LOCAL_SIZE) in;

uvec2 rows_of_group(uint group) {
    return uvec2(push.operands.group_begins.v[group], push.operands.group_ends.v[group]);
}

#include "include/group_tiles.glsl"

void main() {
    write_all_groups();
}
