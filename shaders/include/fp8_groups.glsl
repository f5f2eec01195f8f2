// SPDX-License-Identifier: MIT
// Which rows stand in a tile of 128 x 1 blocks: fp8/recipe.hpp, Quantized::group_offsets.
#ifndef BELLOWS_FP8_GROUPS_GLSL
#define BELLOWS_FP8_GROUPS_GLSL

#include "storage.glsl"

struct TileRows {
    uint first;
    uint end;   // <= first: the tile has no rows
    uint group; // whose rows they are
};

TileRows plain_tile(uint tile, uint rows) {
    return TileRows(128u * tile, min(128u * tile + 128u, rows), 0u);
}

// offsets: [groups + 1], ascending; groups >= 1.
TileRows grouped_tile(uvec2 offsets, uint groups, uint tile, uint rows) {
    uint low = 0u, high = groups; // the group is in [low, high)
    if (groups > 1u) {
        do { // a test at the loop's head would read once more than it should: common.glsl
            uint middle = (low + high) / 2u;
            bool not_beyond = ReadUint(offsets).v[middle] / 128u + middle <= tile;
            low = not_beyond ? middle : low;
            high = not_beyond ? high : middle;
        } while (high - low > 1u);
    }
    uint begin = ReadUint(offsets).v[low];
    uint end = min(ReadUint(offsets).v[low + 1u], rows);
    uint first_tile = begin / 128u + low;
    if (tile < first_tile) {
        return TileRows(0u, 0u, low);
    }
    uint first = begin + 128u * (tile - first_tile);
    return TileRows(first, min(first + 128u, end), low);
}

#endif
