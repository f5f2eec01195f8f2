// SPDX-License-Identifier: MIT
// y = code * scale, in f32 or bf16 (nearest even; exact for power-of-two scales).
//   codes   [batch, rows, columns] bytes
//   scales  f32, or UE8M0 bytes (blocks_form 4); shapes by blocks_form as fp8/recipe.hpp says:
//           0 Rows128, 1 Columns128, 2 Blocks128, 3 PerTensor, 4 MX32
//   y       [batch, rows, columns] of the variant's storage
//   row_count [1] u32: rows that are there; group_offsets [groups + 1] u32 if groups > 0 (blocks_form
//   1): include/fp8_groups.glsl. Other rows are neither read nor written.
//   tiles   with `listed`: a work list of grouped_gemm_tiles.comp, whose tiles have row_tiles rows
//           each, up to group_offsets[group], which are then the groups' ends; batch = 1
// Strides in eights of elements, those of scales in words (f32) or bytes (UE8M0). Rows of y end in
// unspecified values up to a multiple of 8; rows of codes are read up to one.
// An invocation takes `unit` neighbouring columns: 8, or 4 where y is f32, so that what neighbours
// write lies side by side; CPU drivers take 8.
// Dispatch: x = tiles of rows, of 128 for Columns128 (its scales' rows), else of steps * 4 * local_size
// / lanes_x (grid-stride), y = ceil(columns / (unit * lanes_x)), z = batch; with `listed` indirect, x =
// number of tiles, which are no higher than that, any y. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "include/fp8_groups.glsl"
#if STORAGE_BF16
#define Y8 uvec4
#define Y_LOG2_BYTES 4u
#else
#define Y8 vec4
#define Y_LOG2_BYTES 5u
#endif
#include "fp8_dequantize.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kRows128 = 0u, kColumns128 = 1u, kBlocks128 = 2u, kPerTensor = 3u, kMx32 = 4u;
const uint kSteps = 4u;
const uint step_rows = local_size / lanes_x;

uvec2 codes_base, y_base, scales_base;
uint scales_stride;

// Columns from unit * group on; with a unit of 4, x.low.
void store(uint row, uint group, Eight x) {
    uint at = row * (8u / unit) * push.y_stride8 + group;
#if STORAGE_BF16
    uvec4 packed = exact != 0u ? bf16_pack_exact(x)
                               : uvec4(bf16_pack(x.low), bf16_pack(x.high));
    WriteUvec4(y_base).v[at] = packed;
#else
    WriteVec4(y_base).v[unit / 4u * at] = x.low;
    if (unit == 8u) {
        WriteVec4(y_base).v[2u * at + 1u] = x.high;
    }
#endif
}

// 2^(code - 127) as a normal f32 factor and one that takes it to 2^-127.
vec2 mx_scale(uint row, uint group) {
    uint at = row * scales_stride + group / (32u / unit);
    uint code = (ReadUint(scales_base).v[at / 4u] >> (8u * (at % 4u))) & 0xFFu;
    uint bits = code == 0xFFu ? FP8_NAN : max(code, 1u) << 23;
    return vec2(uintBitsToFloat(bits), code == 0u ? 0.5 : 1.0);
}

float scale_at(uint at) {
    return ReadFloat(scales_base).v[at];
}

Eight scale_eight(uint row, uint group, Eight x) {
    if (blocks_form == kMx32) {
        vec2 scale = mx_scale(row, group);
        precise vec4 low = x.low * scale.x;
        precise vec4 high = x.high * scale.x;
        low = low * scale.y;
        high = high * scale.y;
        return Eight(low, high);
    }
    uint at = 0u;
    if (blocks_form == kRows128) {
        at = row * scales_stride + group / (128u / unit);
    } else if (blocks_form == kBlocks128) {
        at = row / 128u * scales_stride + group / (128u / unit);
    }
    return scaled(x, scale_at(at));
}

Eight decode8(uvec2 codes) {
    return Eight(fp8_decode4(format, codes.x),
                 unit == 8u ? fp8_decode4(format, codes.y) : vec4(0));
}

uvec2 read_codes(uint row, uint group) {
    uint at = row * (8u / unit) * push.codes_stride8 + group;
    return unit == 8u ? ReadUvec2(codes_base).v[at] : uvec2(ReadUint(codes_base).v[at], 0u);
}

// The rows first + i * step_rows + lane / lanes_x < end of i < steps * kSteps.
void dequantize_rows(uint first, uint end, uint group, vec4 column_low, vec4 column_high) {
    uint mine = first + gl_LocalInvocationIndex / lanes_x;
    for (uint n = 0u; n < steps; ++n) {
        uvec2 raw[kSteps];
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint row = mine + (n * kSteps + i) * step_rows;
            raw[i] = uvec2(0);
            if (row < end) {
                raw[i] = read_codes(row, group);
            }
        }
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint row = mine + (n * kSteps + i) * step_rows;
            if (row < end) {
                Eight x = decode8(raw[i]);
                if (blocks_form == kColumns128) {
                    store(row, group, Eight(x.low * column_low, x.high * column_high));
                } else {
                    store(row, group, scale_eight(row, group, x));
                }
            }
        }
    }
}

// The columns of a tile of the list.
void dequantize_listed() {
    uint first = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u];
    uint end = push.operands.group_offsets.v[push.operands.tiles.v[2u * gl_WorkGroupID.x]];
    end = min(first + push.row_tiles, end);
    uint lane = gl_LocalInvocationIndex % lanes_x;
    FOR_COUNTED(group, gl_WorkGroupID.y * lanes_x, div_up(push.columns, unit)) {
        if (unit * (group + lane) < push.columns) {
            dequantize_rows(first, end, group + lane, vec4(0), vec4(0));
        }
    } NEXT_COUNTED(group, div_up(push.columns, unit), gl_NumWorkGroups.y * lanes_x);
}

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uint batch = gl_WorkGroupID.z;
    codes_base = address_add(uvec2(push.operands.codes), batch, push.codes_batch8, 3u);
    y_base = address_add(uvec2(push.operands.y), batch, push.y_batch8, Y_LOG2_BYTES);
    scales_base = address_add(uvec2(push.operands.scales), batch, push.scales_batch, 2u);
    scales_stride = push.scales_stride;
    if (listed != 0u) {
        dequantize_listed();
        return;
    }
    uint group = gl_WorkGroupID.y * lanes_x + gl_LocalInvocationIndex % lanes_x;
    if (unit * group >= push.columns) {
        return;
    }
    uint tile_rows = blocks_form == kColumns128 ? 128u : steps * kSteps * step_rows;
    FOR_COUNTED(tile, gl_WorkGroupID.x, push.row_tiles) {
        TileRows part = TileRows(tile * tile_rows, min((tile + 1u) * tile_rows, rows), 0u);
        vec4 low = vec4(0), high = vec4(0);
        if (blocks_form == kColumns128) {
            if (push.groups != 0u) {
                part = grouped_tile(uvec2(push.operands.group_offsets), push.groups, tile, rows);
            }
            if (part.first < part.end) {
                uint at = (tile * scales_stride + unit * group) / 4u;
                low = ReadVec4(scales_base).v[at];
                if (unit == 8u) {
                    high = ReadVec4(scales_base).v[at + 1u];
                }
            }
        }
        dequantize_rows(part.first, part.end, group, low, high);
    } NEXT_COUNTED(tile, push.row_tiles, gl_NumWorkGroups.x);
}
