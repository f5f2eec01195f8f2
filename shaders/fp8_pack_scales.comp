// SPDX-License-Identifier: MIT
// Scales of a packed operand, their peaks and spread: include/fp8_packed.glsl. Power-of-two scales.
//
// tiles   tile t is the (t % batch_tiles)-th of batch entry t / batch_tiles
// source  the scale of (x, block) stands at (x >> x_shift) * stride_x + block * stride_block, plus
//         batch entry * batch_stride; x_shift 7: a tile has one scale per block
// codes   as fp8_pack_operand's source, of k along the sum: of blocks whose scales lie far below the
//         peak. The scale of zeros says nothing and becomes the peak, so that a block of zeros (whose
//         own scale is the least there is) does not widen the spread.
// If by groups (groups > 0): the sum goes over the rows of a group; blocks of group g begin at
//         group_offsets[g] / 128 + g, and unit z * tiles + t is that of tile t over group z.
// Dispatch x = tiles, z = groups or 1. Shared 516 B.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"

#include "fp8_pack_scales.kernel.glsl"

layout(local_size_x = 128) in;

shared uint distances[128];
shared uint found;

const uint ONE = 0x3F800000u;
const uint INFINITY = 0x7F800000u;
const uint FAR = 8u; // powers of two
const uint AT_ONCE = 8u;

uint lane, x, first_k, end_k;
bool present;
uvec2 codes;

// Whether any of x's codes in this block is not zero.
bool any_code(uint block) {
    uint k = first_k + block * 128u, end = min(k + 128u, end_k), any = 0u;
    while (k < end && any == 0u) {
        if (by_k == 0u) {
            uvec4 chunk = ReadUvec4(codes).v[x * push.ld16 + k / 16u] & 0x7F7F7F7Fu;
            any = chunk.x | chunk.y | chunk.z | chunk.w;
            k += 16u;
        } else {
            any = ReadUint(codes).v[k * push.ld16 * 4u + x / 4u] >> (8u * (x % 4u)) & 0x7Fu;
            ++k;
        }
    }
    return any != 0u;
}

// The scales of AT_ONCE blocks from b on; 0 behind `count` and of an x that is not there.
void load(uint from, uint b, uint count, out uint scale[AT_ONCE]) {
    [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
        scale[i] = 0u;
        if (present && b + i < count) {
            scale[i] = push.operands.source.v[from + (b + i) * push.stride_block];
        }
    }
}

// Those of these blocks, as bits, that hold nothing but zeros and whose scales are far from the peak.
uint far_zeros(uint b, uint scale[AT_ONCE], uint peak) {
    uint far = 0u, filled = 0u;
    [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
        if (scale[i] != 0u && scale[i] < peak && (peak - scale[i]) >> 23 > FAR) {
            far |= 1u << i;
            filled |= any_code(b + i) ? 1u << i : 0u;
        }
    }
    if (push.x_shift != 0u) { // of all x together
        if (lane == 0u) {
            found = 0u;
        }
        barrier();
        if (filled != 0u) {
            atomicOr(found, filled);
        }
        barrier();
        filled = found;
        barrier();
    }
    return far & ~filled;
}

void main() {
    uint tile = gl_WorkGroupID.x, entry = tile / push.batch_tiles;
    uint end = push.extent, at = entry * push.batch_stride;
    lane = gl_LocalInvocationIndex;
    codes = address_add(uvec2(push.operands.codes), entry, push.batch_stride16, 4u);
    first_k = 0u;
    end_k = push.k;
    x = tile % push.batch_tiles * 128u + lane;
    uint first = 0u, count = push.blocks;
    if (push.groups > 0u) {
        uint g = gl_WorkGroupID.z;
        first_k = push.operands.group_offsets.v[g];
        end_k = push.operands.group_offsets.v[g + 1u];
        first = first_k / 128u + g;
        count = (end_k - first_k + 127u) / 128u;
    }
    present = x < end;
    uint from = at + (x >> push.x_shift) * push.stride_x + first * push.stride_block;
    uint to = (tile * push.blocks + first) * 128u + lane;
    uint most = 0u;
    uint scale[AT_ONCE];
    for (uint b = 0u; b < count; b += AT_ONCE) {
        load(from, b, count, scale);
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            most = max(most, scale[i] > INFINITY ? 0u : scale[i]);
        }
    }
    uint peak = most == 0u ? ONE : most;
    uint least = peak;
    for (uint b = 0u; b < count; b += AT_ONCE) {
        load(from, b, count, scale);
        uint zeros = far_zeros(b, scale, peak);
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            if (b + i < count) {
                uint kept = !present ? ONE : ((zeros >> i & 1u) != 0u ? peak : scale[i]);
                least = present ? min(least, kept) : least;
                push.operands.scales.v[to + (b + i) * 128u] = kept;
            }
        }
    }
    uint unit = gl_WorkGroupID.z * gl_NumWorkGroups.x + tile;
    push.operands.peaks.v[unit * 128u + lane] = peak;
    distances[lane] = (peak - least) >> 23;
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
