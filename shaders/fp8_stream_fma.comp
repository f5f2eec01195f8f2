// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) for few rows of A and E4M3 codes of B, by f32 arithmetic on any device:
// the codes of B are read from memory once for up to `rows` rows of A and decoded in registers. An
// invocation computes rows x 4 elements of D, eight neighbours rows x 32.
//
// a       A_FP8: codes [rows, k], a_scales: one f32 per 128 k of each row (a_shift 0) or 128 rows (7);
//         else bf16 or f32, lda elements from row to row
// b       codes [groups or batch, n, k], b_scales one f32 per 128 x 128 (b_shift 7) or 1 x 128 (0)
// d       [rows, n]
// a_by_slot, d_by_slot  row r of a group stands in row slots[r] / slots_per_a_row of A, and slots[r]
//            of D (nowhere if that is -1)
// from_list  the group of tile t is tiles[2t], its rows go from tiles[2t + 1] to ends[group], at most
//            tile_rows of them; otherwise z is the batch, x counts tiles of tile_rows rows of m
//
// Constants  local_size  a multiple of 8
//            rows        per invocation: 4, 8 or 16
//            aligned     1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            aligned_a   the same of a that is not A_FP8
//            share_a     1: invocations pass rows of A round (A_FP8, local_size and subgroups of 8)
// Dispatch   x = tiles of rows (indirect with from_list), y = ceil(n / 32), z = batch. No shared memory.
// Order      f32 fused multiply-adds of code * scale in ascending k: "f32-sequential", the same bits
//            as operands decoded ahead give.
#version 460
#extension GL_GOOGLE_include_directive : require
#define B_BF16 0
#include "include/gemm_operands.glsl"
#include "include/fp8.glsl"
#if A_FP8
#undef A_ELEMENT
#define A_ELEMENT uvec4
#endif

#include "fp8_stream_fma.kernel.glsl"

layout(local_size_x_id = 0) in;

struct Tile {
    uvec2 a;        // addresses, of the batch entry or group
    uvec2 b;
    uvec2 a_scales;
    uvec2 b_scales;
    uvec2 d;
    uint row0;
    uint end;       // rows that exist
    uint column0;
};

uint a_row(Tile t, uint row) {
    uint r = min(t.row0 + row, t.end - 1u);
    return a_by_slot != 0u ? uint(max(push.operands.slots.v[r], 0)) / push.slots_per_a_row : r;
}

// Sixteen codes from k = 16 * at, those from push.k on as 0.
uvec4 present(uvec4 codes, uint at) {
    return 16u * at + 16u > push.k ? fp8_before(codes, 16u * at, push.k) : codes;
}

// Twice the values of four codes that are not NaN. Moved into an f32 whose exponent is one too high,
// a normal code gives twice its value, a subnormal one 2^-6 + its value; u and 2u - 2^-5 are then what
// is wanted of a normal and a subnormal one, and too large of the other.
vec4 twice(uint codes) {
    uvec4 up = uvec4(codes << 20, codes << 12, codes << 4, codes >> 4);
    vec4 u = uintBitsToFloat((up & 0x07F00000u) + 0x3C800000u);
    precise vec4 small = fma(u, vec4(2.0), vec4(-0.03125));
    uvec4 sign = uvec4(codes << 24, codes << 16, codes << 8, codes) & 0x80000000u;
    return uintBitsToFloat(floatBitsToUint(min(u, small)) | sign);
}

vec4 sums[rows];
uint a_rows[rows]; // where they stand

// Four k of row i of A, from 4 * q of the sixteen that are being summed.
#if A_FP8
const uint MINE = share_a != 0u ? (rows + 7u) / 8u : rows; // rows that an invocation decodes
uvec4 a_codes[MINE];
vec4 a_four[MINE];
float a_scale[MINE];
uint a_nan[MINE];

void find_rows(Tile t) {
    [[unroll]] for (uint i = 0u; i < MINE; ++i) {
        a_rows[i] = a_row(t, share_a != 0u ? min(8u * i + gl_LocalInvocationIndex, rows - 1u) : i);
    }
}
void fetch_scales(Tile t, uint block) {
    [[unroll]] for (uint i = 0u; i < MINE; ++i) {
        a_scale[i] = 0.5 * ReadFloat(t.a_scales)
                               .v[(a_rows[i] >> push.a_shift) * push.a_scale_ld + block];
    }
}
void fetch_a(Tile t, uint at) {
    [[unroll]] for (uint i = 0u; i < MINE; ++i) {
        a_codes[i] = present(ReadUvec4(t.a).v[a_rows[i] * push.lda + at], at);
        a_nan[i] |= fp8_e4m3_nan_bits(a_codes[i]);
    }
}
void decode_a(uint q) {
    [[unroll]] for (uint i = 0u; i < MINE; ++i) {
        a_four[i] = twice(a_codes[i][q]) * a_scale[i];
    }
}
vec4 a_at(Tile t, uint i, uint k) {
    return share_a != 0u ? subgroupBroadcast(a_four[i / 8u], i % 8u) : a_four[i];
}
bool is_nan_row(uint i) {
    uint bits = share_a != 0u ? subgroupBroadcast(a_nan[i / 8u], i % 8u) : a_nan[i];
    return (bits & 0x80808080u) != 0u;
}
#else
void find_rows(Tile t) {
    [[unroll]] for (uint i = 0u; i < rows; ++i) {
        a_rows[i] = a_row(t, i);
    }
}
void fetch_scales(Tile t, uint block) {
}
void fetch_a(Tile t, uint at) {}
void decode_a(uint q) {}
vec4 a_at(Tile t, uint i, uint k) {
    uint first = a_rows[i] * push.lda;
    if (aligned_a != 0u && k + 4u <= push.k) {
        return load_a4(t.a, first + k);
    }
    vec4 x = vec4(0);
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        float value = load_a(t.a, first + min(k + e, push.k - 1u));
        x[e] = k + e < push.k ? value : 0.0;
    }
    return x;
}
bool is_nan_row(uint i) {
    return false;
}
#endif

uint b_nan[4];

uint b_column(Tile t, uint c) {
    return min(t.column0 + c, push.n - 1u);
}

void sum_sixteen(Tile t, uint at, vec4 b_scale) {
    uvec4 b_codes[4];
    [[unroll]] for (uint c = 0u; c < 4u; ++c) {
        b_codes[c] = present(ReadUvec4(t.b).v[b_column(t, c) * push.ldb16 + at], at);
        b_nan[c] |= fp8_e4m3_nan_bits(b_codes[c]);
    }
    fetch_a(t, at);
    [[unroll]] for (uint q = 0u; q < 4u; ++q) {
        vec4 b[4];
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            b[c] = twice(b_codes[c][q]) * b_scale[c];
        }
        decode_a(q);
        [[unroll]] for (uint i = 0u; i < rows; ++i) {
            vec4 a = a_at(t, i, 16u * at + 4u * q);
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                sums[i] = fma(vec4(a[e]), vec4(b[0][e], b[1][e], b[2][e], b[3][e]), sums[i]);
            }
        }
    }
}

// Loops test at their end, see FOR_COUNTED.
void sum_up(Tile t) {
    uint chunks = (push.k + 15u) / 16u, at = 0u;
    do {
        vec4 b_scale;
        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
            b_scale[c] = 0.5 * ReadFloat(t.b_scales)
                                   .v[(b_column(t, c) >> push.b_shift) * push.b_scale_ld + at / 8u];
        }
        fetch_scales(t, at / 8u);
        uint end = min(at + 8u, chunks);
        do {
            sum_sixteen(t, at, b_scale);
        } while (++at < end);
    } while (at < chunks);
}

void store_sums(Tile t) {
    [[unroll]] for (uint i = 0u; i < rows; ++i) {
        bool nan_row = is_nan_row(i);
        uint row = t.row0 + i;
        bool there = row < t.end && t.column0 < push.n;
        if (d_by_slot != 0u && there) {
            row = uint(push.operands.slots.v[row]);
            there = int(row) >= 0;
        }
        if (there) {
            [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                if (nan_row || (b_nan[c] & 0x80808080u) != 0u) {
                    sums[i][c] = uintBitsToFloat(FP8_NAN);
                }
            }
            uint index = row * push.ldd + t.column0;
            if (aligned != 0u) {
                store_d4(t.d, index, sums[i], 1.0, push.accumulate != 0u);
            } else {
                store_d_part(t.d, index, sums[i], min(push.n - t.column0, 4u), 1.0,
                             push.accumulate != 0u);
            }
        }
    }
}

void main() {
    Tile t;
    t.column0 = (gl_WorkGroupID.y * 8u + gl_LocalInvocationIndex % 8u) * 4u;
    uint g = gl_WorkGroupID.z;
    t.row0 = gl_WorkGroupID.x * push.tile_rows;
    t.end = min(t.row0 + push.tile_rows, push.m);
    t.a = uvec2(push.operands.a);
    t.a_scales = uvec2(push.operands.a_scales);
    t.d = uvec2(push.operands.d);
    if (push.from_list != 0u) {
        g = push.operands.tiles.v[2u * gl_WorkGroupID.x];
        t.row0 = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u];
        t.end = min(t.row0 + push.tile_rows, push.operands.ends.v[g]);
    } else {
        t.a = address_add(t.a, g, push.a_batch, A_FP8 != 0 ? 4u : A_LOG2_BYTES);
        t.a_scales = address_add(t.a_scales, g, push.a_scale_batch, 2u);
        t.d = address_add(t.d, g, push.stride_d, D_LOG2_BYTES);
    }
    t.b = address_add(uvec2(push.operands.b_codes), g, push.b_batch16, 4u);
    t.b_scales = address_add(uvec2(push.operands.b_scales), g, push.b_scale_batch, 2u);
    t.row0 += (local_size == 8u ? 0u : gl_LocalInvocationIndex / 8u) * rows;
    if (t.row0 < t.end) {
        do {
            [[unroll]] for (uint i = 0u; i < rows; ++i) {
                sums[i] = vec4(0);
            }
#if A_FP8
            [[unroll]] for (uint i = 0u; i < MINE; ++i) {
                a_nan[i] = 0u;
            }
#endif
            [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                b_nan[c] = 0u;
            }
            find_rows(t);
            sum_up(t);
            store_sums(t);
            t.row0 += local_size / 8u * rows;
        } while (t.row0 < t.end);
    }
}
