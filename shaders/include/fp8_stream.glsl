// SPDX-License-Identifier: MIT
// What kernels for few rows of E4M3 codes share (fp8_stream_gemm.comp says what they compute): their
// tiles, codes as f16, and how scales reach A and sums reach D. They have the same operands and push
// fields, and define BLOCK_M and BLOCK_N, the rows and columns of D per workgroup, beforehand.
//
// Scales of both operands go into A: its codes are scaled by a power of two that says how far the
// product of a block's scales lies below the row's largest; what that makes of a sum is applied once,
// at the end. A row in which that distance exceeds what f16 holds (2^22) is computed by f32 arithmetic
// instead.
#ifndef BELLOWS_FP8_STREAM_GLSL
#define BELLOWS_FP8_STREAM_GLSL

#include "fp8.glsl"
#include "fp8_f16.glsl"

shared uint peaks[BLOCK_M];
shared uint slow_rows[(BLOCK_M + 31u) / 32u];
shared uint nan_columns[(BLOCK_N + 31u) / 32u];

struct Tile {
    uvec2 a;        // addresses, of the batch entry or group
    uvec2 b;
    uvec2 a_scales;
    uvec2 b_scales;
    uvec2 d;
    uint row0;
    uint rows;      // of the tile, that exist
    uint column0;
};

// That of this workgroup: `rows` of one group or batch entry, which may be several times BLOCK_M, or
// none at all.
Tile tile_of_workgroup() {
    Tile t;
    t.column0 = gl_WorkGroupID.y * unit;
    t.rows = 0u;
    if (t.column0 % BLOCK_N != 0u || t.column0 >= push.n) {
        return t;
    }
    uint g = gl_WorkGroupID.z, end = min((gl_WorkGroupID.x + 1u) * BLOCK_M, push.m);
    t.row0 = gl_WorkGroupID.x * BLOCK_M;
    t.a = uvec2(push.operands.a_codes);
    t.a_scales = uvec2(push.operands.a_scales);
    t.d = uvec2(push.operands.d);
    if (push.from_list != 0u) {
        g = push.operands.tiles.v[2u * gl_WorkGroupID.x];
        t.row0 = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u];
        end = min(t.row0 + push.tile_rows, push.operands.ends.v[g]);
    } else {
        t.a = address_add(t.a, g, push.a_batch16, 4u);
        t.a_scales = address_add(t.a_scales, g, push.a_scale_batch, 2u);
        t.d = address_add(t.d, g, push.stride_d, D_LOG2_BYTES);
    }
    t.b = address_add(uvec2(push.operands.b_codes), g, push.b_batch16, 4u);
    t.b_scales = address_add(uvec2(push.operands.b_scales), g, push.b_scale_batch, 2u);
    t.rows = max(end, t.row0) - t.row0;
    return t;
}

uint a_row(Tile t, uint row) {
    uint r = t.row0 + min(row, t.rows - 1u);
    return a_by_slot != 0u ? uint(max(push.operands.slots.v[r], 0)) / push.slots_per_a_row : r;
}
// row: as a_row says
uint scale_of_a(Tile t, uint row, uint block) {
    return ReadUint(t.a_scales).v[(row >> push.a_shift) * push.a_scale_ld + block];
}
uint scale_of_b(Tile t, uint block) {
    return ReadUint(t.b_scales).v[t.column0 / 128u * push.b_scale_ld + block];
}

// Sixteen codes from k = 16 * at, those from push.k on as 0.
uvec4 present(uvec4 codes, uint at) {
    return 16u * at + 16u > push.k ? fp8_before(codes, 16u * at, push.k) : codes;
}

bool is_nan(uint scale) {
    return scale > FP8_INFINITY;
}
// Of the product of two scales, from 0 to 508.
uint exponent_of(uint scale_a, uint scale_b) {
    return (scale_a >> 23) + (scale_b >> 23);
}

// peaks[row]: the largest exponent_of over the blocks.
void find_peaks(Tile t) {
    uint lane = gl_LocalInvocationIndex;
    if (lane < BLOCK_M) {
        peaks[lane] = 0u;
    }
    if (lane < (BLOCK_M + 31u) / 32u) {
        slow_rows[lane] = 0u;
    }
    if (lane < (BLOCK_N + 31u) / 32u) {
        nan_columns[lane] = 0u;
    }
    barrier();
    uint blocks = (push.k + 127u) / 128u;
    uint item = lane;
    do {
        uint of_a[8], of_b[8];
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            uint block = min((item + i * local_size) / BLOCK_M, blocks - 1u);
            of_a[i] = scale_of_a(t, a_row(t, (item + i * local_size) % BLOCK_M), block);
            of_b[i] = scale_of_b(t, block);
        }
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            if (!is_nan(of_a[i]) && !is_nan(of_b[i])) {
                atomicMax(peaks[(item + i * local_size) % BLOCK_M], exponent_of(of_a[i], of_b[i]));
            }
        }
        item += 8u * local_size;
    } while (item < BLOCK_M * blocks);
    barrier();
}

// value * 2^exponent, where no step of it leaves the range unless the result does.
float raised(float value, int exponent) {
    int some = exponent >> 1;
    precise float x = value * uintBitsToFloat(uint(127 + some) << 23);
    x = x * uintBitsToFloat(uint(127 + exponent - some) << 23);
    return x;
}

void store(Tile t, uint row, uint column, vec4 x) {
    uint to = t.row0 + row;
    if (d_by_slot != 0u) {
        to = uint(push.operands.slots.v[to]);
        if (int(to) < 0) {
            return;
        }
    }
    uint at = to * push.ldd + t.column0 + column;
    if (aligned != 0u) {
        store_d4(t.d, at, x, 1.0, push.accumulate != 0u);
    } else {
        store_d_part(t.d, at, x, min(push.n - t.column0 - column, 4u), 1.0, push.accumulate != 0u);
    }
}

bool is_slow(uint row) {
    return (slow_rows[row / 32u] >> row % 32u & 1u) != 0u;
}

void store_sum(Tile t, uint row, uint column, vec4 x) {
    if (row < t.rows && t.column0 + column < push.n && !is_slow(row)) {
        uint nan = nan_columns[column / 32u] >> column % 32u;
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            x[e] = raised(x[e], int(peaks[row]) - 253);
            if ((nan >> e & 1u) != 0u) {
                x[e] = uintBitsToFloat(FP8_NAN);
            }
        }
        store(t, row, column, x);
    }
}

// One element of a slow row.
float slow_sum(Tile t, uint row, uint column) {
    float sum = 0.0;
    uint last = (push.k - 1u) / 16u, at = 0u;
    row = a_row(t, row);
    do {
        // In bounds even where a loop's body is run with an empty mask: common.glsl.
        uint to = min(at, last);
        uvec4 a = present(ReadUvec4(t.a).v[row * push.lda16 + to], at);
        uvec4 b = present(ReadUvec4(t.b).v[(t.column0 + column) * push.ldb16 + to], at);
        float of_a = uintBitsToFloat(scale_of_a(t, row, to / 8u));
        float of_b = uintBitsToFloat(scale_of_b(t, to / 8u));
        for (uint q = 0u; q < 4u; ++q) {
            vec4 left = fp8_decode4(FP8_E4M3, a[q]) * of_a;
            vec4 right = fp8_decode4(FP8_E4M3, b[q]) * of_b;
            for (uint c = 0u; c < 4u; ++c) {
                sum = fma(left[c], right[c], sum);
            }
        }
    } while (++at <= last);
    return sum;
}

void store_slow_rows(Tile t) {
    for (uint row = 0u; row < BLOCK_M; ++row) { // only rows that exist are slow
        if (is_slow(row)) {
            for (uint quad = gl_LocalInvocationIndex; quad < BLOCK_N / 4u; quad += local_size) {
                vec4 x = vec4(0);
                for (uint e = 0u; e < 4u && t.column0 + 4u * quad + e < push.n; ++e) {
                    x[e] = slow_sum(t, row, 4u * quad + e);
                }
                if (t.column0 + 4u * quad < push.n) {
                    store(t, row, 4u * quad, x);
                }
            }
        }
    }
}

#endif
