// SPDX-License-Identifier: MIT
// Scales of a packed operand, their peaks and spread: include/fp8_packed.glsl. Power-of-two scales.
//
// list    of tiles (group, first x) and their number, if from_list; tile t then has x from list's
//         first to ends[group]. Otherwise x goes over a batch: tile t is the (t % batch_tiles)-th of
//         batch entry t / batch_tiles.
// source  the scale of (x, block) stands at (x >> x_shift) * stride_x + block * stride_block, plus
//         batch entry * batch_stride
// If by groups (groups > 0): the sum goes over the rows of a group; blocks of group g begin at
//         group_offsets[g] / 128 + g, and unit z * tiles + t is that of tile t over group z.
// Dispatch x = tiles, z = groups or 1. Shared 512 B.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"

#include "fp8_pack_scales.kernel.glsl"

layout(local_size_x = 128) in;

shared uint distances[128];

const uint ONE = 0x3F800000u;
const uint INFINITY = 0x7F800000u;

void main() {
    uint tile = gl_WorkGroupID.x;
    uint lane = gl_LocalInvocationIndex;
    uint x, end, at = 0u;
    if (push.from_list != 0u) {
        if (tile >= push.operands.tile_count.v[0]) {
            return;
        }
        uint group = push.operands.list.v[2u * tile];
        x = push.operands.list.v[2u * tile + 1u] + lane;
        end = push.operands.ends.v[group];
    } else {
        x = tile % push.batch_tiles * 128u + lane;
        end = push.extent;
        at = tile / push.batch_tiles * push.batch_stride;
    }
    uint first = 0u, count = push.blocks;
    if (push.groups > 0u) {
        uint g = gl_WorkGroupID.z;
        uint begin = push.operands.group_offsets.v[g];
        uint rows = push.operands.group_offsets.v[g + 1u] - begin;
        first = begin / 128u + g;
        count = (rows + 127u) / 128u;
    }
    bool present = x < end;
    at += (x >> push.x_shift) * push.stride_x;
    uint to = (tile * push.blocks + first) * 128u + lane;
    uint most = 0u, least = INFINITY;
    for (uint b = 0u; b < count; ++b) {
        uint scale = ONE;
        if (present) {
            scale = push.operands.source.v[at + (first + b) * push.stride_block];
            most = max(most, scale > INFINITY ? 0u : scale);
            least = min(least, scale);
        }
        push.operands.scales.v[to + b * 128u] = scale;
    }
    uint peak = most == 0u ? ONE : most;
    uint unit = gl_WorkGroupID.z * gl_NumWorkGroups.x + tile;
    push.operands.peaks.v[unit * 128u + lane] = peak;
    distances[lane] = least == INFINITY ? 0u : (peak - min(least, peak)) >> 23;
    barrier();
    for (uint reach = 64u; reach > 0u; reach /= 2u) {
        if (lane < reach) {
            distances[lane] = max(distances[lane], distances[lane + reach]);
        }
        barrier();
    }
    if (lane == 0u) {
        push.operands.spread.v[unit] = distances[0];
    }
}
