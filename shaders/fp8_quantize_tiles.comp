// SPDX-License-Identifier: MIT
// Tiles of 128 x 128 to E4M3 or E5M2 with scales of blocks that span rows: fp8/recipe.hpp,
// Columns128 and Blocks128; and Rows128 beside Columns128, from one pass over memory. Variant fp8
// reads rows that were quantised as Rows128.
//   x            [batch, rows, columns] f32, bf16 or bytes (input_format)
//   x_scales     [rows, ceil(columns / 128)] f32, variant fp8 only
//   codes        [batch, rows, columns] bytes
//   scales       mode columns: [batch, row tiles, columns] f32, blocks: [batch, row tiles, column
//                tiles] f32
//   row_codes, row_scales  like x and x_scales, in mode columns if also_rows
//   row_count    [1] u32: rows that are there
//   group_offsets [groups + 1] u32, if groups > 0: include/fp8_groups.glsl
// Absent rows count as zero and are neither read nor written; a tile without rows leaves its scales
// alone. Strides in eights of elements, those of scales in words.
// Forms: lanes_x = 16 and local_size = 256: each invocation keeps 8 rows x 8 columns. lanes_x = 8
//   and local_size = 8 (CPU drivers): 128 rows x 16 columns each, x read again from the cache.
// Dispatch: x = column tiles, y = row tiles (grid-stride), z = batch.
// Shared memory: 1 KiB + 64 * local_size + 512 * lanes_x + 4 * local_size bytes, 26 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "include/fp8_groups.glsl"
#include "fp8_quantize_tiles.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kKept = 8u;
const uint lanes_y = local_size / lanes_x;
const bool streamed = lanes_y == 1u;

shared uvec4 column_most[32u * lanes_y];
shared uint row_most[128u * lanes_x];
shared uint lane_most[local_size];
shared vec4 column_factor[32];
shared float row_factor[128];

uvec2 x_base, codes_base, scales_base;
uint lane_x, lane_y;
uvec4 low_most, high_most; // of this invocation's eight columns

Eight values(uint row, uint group, Raw8 raw) {
#if INPUT_FP8
    Eight x = Eight(fp8_decode4(input_format, raw.x), fp8_decode4(input_format, raw.y));
    if (8u * group >= push.columns) {
        return x;
    }
    uint block = row * push.x_scales_stride + group / 16u;
    return scaled(x, push.operands.x_scales.v[block]);
#else
    return unpack8(raw);
#endif
}

Raw8 load(uint row, uint group) {
    return load8(x_base, row * push.x_stride8 + group, group, push.columns);
}

void note(uint i, bool first_time, Eight x) {
    uvec4 low = magnitude4(x.low), high = magnitude4(x.high);
    low_most = max(low_most, low);
    high_most = max(high_most, high);
    if (also_rows != 0u) {
        uint most = max4(max(low, high)), at = i * lanes_x + lane_x;
        row_most[at] = first_time ? most : max(row_most[at], most);
    }
}

void finish_columns(uint tile_group) {
    column_most[32u * lane_y + 2u * tile_group] = low_most;
    column_most[32u * lane_y + 2u * tile_group + 1u] = high_most;
}

void scale_columns(uint tile) {
    for (uint c = gl_LocalInvocationIndex; c < 128u; c += local_size) {
        uint most = 0u;
        for (uint y = 0u; y < lanes_y; ++y) {
            most = max(most, column_most[32u * y + c / 4u][c % 4u]);
        }
        float scale = fp8_scale(format, rule, most);
        column_factor[c / 4u][c % 4u] = fp8_inverse(rule, scale);
        uint column = 128u * gl_WorkGroupID.x + c;
        if (column < push.columns) {
            WriteUint(scales_base).v[tile * push.scales_stride + column] = floatBitsToUint(scale);
        }
    }
}

void scale_rows(TileRows rows) {
    for (uint r = gl_LocalInvocationIndex; r < rows.end - rows.first; r += local_size) {
        uint most = 0u;
        for (uint x = 0u; x < lanes_x; ++x) {
            most = max(most, row_most[r * lanes_x + x]);
        }
        float scale = fp8_scale(format, rule, most);
        row_factor[r] = fp8_inverse(rule, scale);
        push.operands.row_scales
            .v[(rows.first + r) * push.row_scales_stride + gl_WorkGroupID.x] = scale;
    }
}

// All invocations call it, between two barriers of the caller's.
void scale_block(uint tile, uint mine) {
    uint lane = gl_LocalInvocationIndex;
    lane_most[lane] = mine;
    barrier();
    for (uint width = local_size / 2u; width > 0u; width /= 2u) {
        if (lane < width) {
            lane_most[lane] = max(lane_most[lane], lane_most[lane + width]);
        }
        barrier();
    }
    if (lane == 0u) {
        float scale = fp8_scale(format, rule, lane_most[0]);
        row_factor[0] = fp8_inverse(rule, scale);
        WriteUint(scales_base).v[tile * push.scales_stride + gl_WorkGroupID.x] =
            floatBitsToUint(scale);
    }
}

void store(uint i, uint row, uint tile_group, Raw8 raw) {
    uint group = 16u * gl_WorkGroupID.x + tile_group;
    if (group >= push.codes_groups) {
        return;
    }
    uint count = present(group, push.columns);
    Eight x = values(row, group, raw);
    uvec2 codes;
    if (blocks != 0u) {
        codes = encode_block8(format, x, row_factor[0]);
    } else {
        codes = uvec2(fp8_encode4(format, x.low * column_factor[2u * tile_group]),
                      fp8_encode4(format, x.high * column_factor[2u * tile_group + 1u]));
    }
    WriteUvec2(codes_base).v[row * push.codes_stride8 + group] = keep_present(codes, count);
    if (also_rows != 0u) {
        codes = encode_block8(format, x, row_factor[i]);
        push.operands.row_codes.v[row * push.row_codes_stride8 + group] =
            keep_present(codes, count);
    }
}

void scales(uint tile, TileRows rows, uint mine) {
    if (blocks != 0u) {
        scale_block(tile, mine);
    } else {
        scale_columns(tile);
        if (also_rows != 0u) {
            scale_rows(rows);
        }
    }
}

void tile_in_registers(uint tile, TileRows rows) {
    uint group = 16u * gl_WorkGroupID.x + lane_x;
    Raw8 raw[kKept];
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        uint row = rows.first + k * lanes_y + lane_y;
        raw[k] = kNothing8;
        if (row < rows.end) {
            raw[k] = load(row, group);
        }
    }
    low_most = uvec4(0);
    high_most = uvec4(0);
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        uint i = k * lanes_y + lane_y;
        if (rows.first + i < rows.end) {
            note(i, true, values(rows.first + i, group, raw[k]));
        }
    }
    finish_columns(lane_x);
    barrier();
    scales(tile, rows, max4(max(low_most, high_most)));
    barrier();
    [[unroll]] for (uint k = 0u; k < kKept; ++k) {
        uint i = k * lanes_y + lane_y;
        if (rows.first + i < rows.end) {
            store(i, rows.first + i, lane_x, raw[k]);
        }
    }
    barrier();
}

void tile_streamed(uint tile, TileRows rows) {
    uint count = rows.end - rows.first, most = 0u;
    for (uint part = 0u; part < 2u; ++part) {
        uint group = 16u * gl_WorkGroupID.x + 8u * part + lane_x;
        low_most = uvec4(0);
        high_most = uvec4(0);
        FOR_COUNTED(i, 0u, count) {
            uint row = rows.first + i;
            note(i, part == 0u, values(row, group, load(row, group)));
        } NEXT_COUNTED(i, count, 1u);
        finish_columns(8u * part + lane_x);
        most = max(most, max4(max(low_most, high_most)));
    }
    barrier();
    scales(tile, rows, most);
    barrier();
    for (uint part = 0u; part < 2u; ++part) {
        uint tile_group = 8u * part + lane_x, group = 16u * gl_WorkGroupID.x + tile_group;
        FOR_COUNTED(i, 0u, count) {
            uint row = rows.first + i;
            store(i, row, tile_group, load(row, group));
        } NEXT_COUNTED(i, count, 1u);
    }
    barrier();
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uint batch = gl_WorkGroupID.z;
    x_base = address_add(uvec2(push.operands.x), batch, push.x_batch8, X_LOG2_BYTES);
    codes_base = address_add(uvec2(push.operands.codes), batch, push.codes_batch8, 3u);
    scales_base = address_add(uvec2(push.operands.scales), batch, push.scales_batch, 2u);
    lane_x = gl_LocalInvocationIndex % lanes_x;
    lane_y = gl_LocalInvocationIndex / lanes_x;
    FOR_COUNTED(tile, gl_WorkGroupID.y, push.row_tiles) {
        TileRows tile_rows = plain_tile(tile, rows);
        if (push.groups != 0u) {
            tile_rows =
                grouped_tile(uvec2(push.operands.group_offsets), push.groups, tile, rows);
        }
        if (tile_rows.first < tile_rows.end) {
            if (streamed) {
                tile_streamed(tile, tile_rows);
            } else {
                tile_in_registers(tile, tile_rows);
            }
        }
    } NEXT_COUNTED(tile, push.row_tiles, gl_NumWorkGroups.y);
}
