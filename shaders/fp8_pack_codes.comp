// SPDX-License-Identifier: MIT
// Codes of a packed operand: include/fp8_packed.glsl. Runs after fp8_pack_scales, whose list, ends,
// batch and groups it shares; a code that is NaN makes its block's scale NaN.
//
// source  codes, rows of a multiple of 16 bytes that end in zeros. by_k 0: memory has x as its rows,
//         (x, k) at x * ld + k. by_k 1: memory has k as its rows, (x, k) at k * ld + x.
// Dispatch x = blocks (of all groups), y = tiles. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_groups.glsl"
#include "include/fp8_packed.glsl"

#include "fp8_pack_codes.kernel.glsl"

layout(local_size_x = 256) in;

bool has_nan(uvec4 codes) {
    uvec4 t = ((codes & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
    return (t.x | t.y | t.z | t.w) != 0u;
}

void put(uint place, uint step, uint x, uint part, uvec4 codes) {
    push.operands.codes.v[place * PACKED_BLOCK + step * PACKED_STEP + packed_chunk(x, part)] = codes;
    if (has_nan(codes)) {
        push.operands.scales.v[place * 128u + x] = 0x7FC00000u;
    }
}

void main() {
    uint block = gl_WorkGroupID.x, tile = gl_WorkGroupID.y;
    uint x0, end;
    uvec2 source = uvec2(push.operands.source);
    if (push.from_list != 0u) {
        if (tile >= push.operands.tile_count.v[0]) {
            return;
        }
        uint group = push.operands.list.v[2u * tile];
        x0 = push.operands.list.v[2u * tile + 1u];
        end = push.operands.ends.v[group];
    } else {
        x0 = tile % push.batch_tiles * 128u;
        end = push.extent;
        source = address_add(source, tile / push.batch_tiles, push.batch_stride16, 4u);
    }
    TileRows depth = push.groups > 0u
                         ? grouped_tile(uvec2(push.operands.group_offsets), push.groups, block, push.k)
                         : plain_tile(block, push.k);
    if (depth.end <= depth.first) {
        return;
    }
    uint place = tile * gl_NumWorkGroups.x + block;
    uint lane = gl_LocalInvocationIndex;
    if (by_k == 0u) {
        uint x = packed_x(lane);
        [[unroll]] for (uint step = 0u; step < 4u; ++step) {
            uint k = depth.first + step * 32u + lane % 2u * 16u;
            uvec4 codes = uvec4(0);
            if (x0 + x < end && k < depth.end) {
                codes = ReadUvec4(source).v[(x0 + x) * push.ld16 + k / 16u];
            }
            put(place, step, x, lane % 2u, codes);
        }
        return;
    }
    uint x = lane % 32u * 4u;
    uint k = depth.first + lane / 32u * 16u;
    uint words[16];
    [[unroll]] for (uint i = 0u; i < 16u; ++i) {
        words[i] = 0u;
        if (x0 + x < end && k + i < depth.end) {
            words[i] = ReadUint(source).v[(k + i) * push.ld16 * 4u + (x0 + x) / 4u];
        }
    }
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        uvec4 codes;
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            uvec4 bytes = uvec4(words[4u * q], words[4u * q + 1u], words[4u * q + 2u],
                                words[4u * q + 3u]) >> (8u * e) & 0xFFu;
            codes[q] = bytes.x | bytes.y << 8 | bytes.z << 16 | bytes.w << 24;
        }
        put(place, lane / 64u, x + e, lane / 32u % 2u, codes);
    }
}
