// SPDX-License-Identifier: MIT
// How a work list of grouped products is written (grouped_gemm_tiles.comp says what stands in it),
// for kernels that have its operands `tiles` and `arguments` and its push fields.
#ifndef BELLOWS_GROUP_TILES_GLSL
#define BELLOWS_GROUP_TILES_GLSL

// Tiles first .. first + count of a group whose rows begin at `row`.
void write_group_tiles(uint group, uint row, uint first, uint count) {
    if (count > 0u) {
        uint tile = first;
        do {
            push.operands.tiles.v[2u * tile] = group;
            push.operands.tiles.v[2u * tile + 1u] = row;
            row += push.tile_rows;
            ++tile;
        } while (tile < first + count);
    }
}

// The grids of all shapes over so many tiles.
void write_grids(uint tiles) {
    uint columns[4] = {push.columns0, push.columns1, push.columns2, push.columns3};
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        push.operands.arguments.v[3u * i] = tiles;
        push.operands.arguments.v[3u * i + 1u] = columns[i];
        push.operands.arguments.v[3u * i + 2u] = 1u;
        push.operands.arguments.v[3u * i + 12u] = tiles;
        push.operands.arguments.v[3u * i + 13u] = div_up(columns[i], push.wide);
        push.operands.arguments.v[3u * i + 14u] = 1u;
    }
}

#ifdef GROUP_TILES_LOCAL_SIZE
shared uint tiles_up_to[GROUP_TILES_LOCAL_SIZE];

// The list of all groups, by one workgroup of GROUP_TILES_LOCAL_SIZE. Defined by the kernel:
// uvec2 rows_of_group(uint group), begin and end.
void write_all_groups() {
    uint lane = gl_LocalInvocationIndex, tiles = 0u, base = 0u;
    do {
        uint group = base + lane, count = 0u;
        uvec2 rows = uvec2(0u);
        if (group < push.groups) {
            rows = rows_of_group(group);
            count = div_up(max(rows.y, rows.x) - rows.x, push.tile_rows);
        }
        uint sum = count;
        tiles_up_to[lane] = sum;
        barrier();
        [[unroll]] for (uint reach = 1u; reach < GROUP_TILES_LOCAL_SIZE; reach *= 2u) {
            sum += lane >= reach ? tiles_up_to[lane - reach] : 0u;
            barrier();
            tiles_up_to[lane] = sum;
            barrier();
        }
        write_group_tiles(group, rows.x, tiles + sum - count, count);
        tiles += tiles_up_to[GROUP_TILES_LOCAL_SIZE - 1u];
        barrier();
        base += GROUP_TILES_LOCAL_SIZE;
    } while (base < push.groups);
    if (lane == 0u) {
        write_grids(tiles);
    }
}
#endif

#endif
