// SPDX-License-Identifier: MIT
// What the kernels share that stream E4M3 weights to the registers of matrices (fp8_few_gemm.comp
// and fp8_stream_gemm.comp, which says where they differ): operands, which rows are whose, and how
// an invocation holds matrices. They have the same operands and these push fields, and define
// beforehand LANES, BLOCK_M (rows of A at a time), BLOCK_N (columns of a workgroup), WARP_N (of a
// subgroup), and `listed`, where the slots of a turn's rows stand from FIRST_LISTED on if they come
// from ids.
//
// a_codes [rows, k], a_scales: f32 bits, one per 128 k of each row (a_shift 0) or 128 rows (7)
// b_codes [groups or batch, n, k], b_scales one per 128 x 128
// d       [rows, n]; all row-major with the strides of `push`: codes' in sixteens
// rows_from says what `places` holds and which rows belong to group (or batch) g:
//   0 BATCH   nothing; all `m` rows of batch g
//   1 IDS     ids of groups, i32 [m]: rows r with places[r] == g; others are in no group, nor is any
//             row from ends[0] * spacing on unless spacing is 0
//   2 SLOT    the same, for fewer ids than groups: y counts ids, the first of each group has it
//   3 MASKED  counts: rows from g * spacing on, places[g] of them, at most `spacing`
//   4 PREFIX  sums: rows places[g] to places[g + 1]
//   5 ENDS    rows from places[g - 1], rounded up to a multiple of `spacing`, to places[g]
//   6 RANGES  rows places[g] to ends[g]
// a_by_slot, d_by_slot  row r stands in row slot / slots_per_a_row of A, and `slot` of D (nowhere if
//           that is -1), where slot is r with IDS and SLOT, slots[r] otherwise
//
// B's columns are the rows of matrices (use A), A's rows their columns (use B), because devices have
// matrices of few columns. An invocation takes sixteen codes of a row at a time, which are the
// elements that it holds of several matrices, one after another: which k these are does not matter
// as long as it is the same for both operands. *_lane, *_slot, *_place and *_chunk say which elements
// it holds (matrix_images.hpp). Moved to the bits of an f16, a code is its value times 2^-8, exactly.
#ifndef BELLOWS_FP8_STREAM_GLSL
#define BELLOWS_FP8_STREAM_GLSL

#include "fp8.glsl"
#include "fp8_f16.glsl"
#include "matrix_slots.glsl"

const uint BATCH = 0u, IDS = 1u, SLOT = 2u, MASKED = 3u, PREFIX = 4u, ENDS = 5u;

#define FROM_IDS (rows_from == IDS || rows_from == SLOT)
#define ELEMENTS_W (mma_m * mma_k / LANES)
#define ELEMENTS_X (mma_n * mma_k / LANES)
#define SLOTS_W (ELEMENTS_W / per_k)
#define SLOTS_X (ELEMENTS_X / per_k)
#define CHUNKS (mma_k / per_k)      // of sixteen codes of a row side by side in a segment
#define SEGMENTS (8u / CHUNKS)      // of a block of 128 k
#define LOADS_W (fragments_n * SLOTS_W)
#define PITCH (WARP_N / 4u + 1u)    // quads from row to row of sums on their way to memory
#define BLOCKS div_up(push.k, 128u)

#define MATRIX_W coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_X coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

struct Tile {
    uvec2 a; // addresses, of the batch entry or group
    uvec2 b;
    uvec2 a_scales;
    uvec2 b_scales;
    uvec2 d;
    uint group;
    uint head;    // its first slot, with FROM_IDS
    uint row0;    // of the group
    uint rows;    // of the group, its later ones are still to be found with FROM_IDS
    uint first;   // of the turn's rows
    uint column0;
};

// Sixteens of codes that exist.
uint existing(uint at) {
    return whole != 0u ? at : min(at, (push.k - 1u) / 16u);
}

// Code i of sixteen, which stand in another order for both operands alike, as f16 times 2^-8.
float16_t code_at(uvec4 codes, uint i) {
    uvec2 pairs = halves(codes[i / 4u]);
    return unpackFloat2x16(i % 4u < 2u ? pairs.x : pairs.y)[i % 2u];
}

// The workgroup's tile of group, batch or id y, of which rows and weights are still to be found.
Tile tile_without_rows() {
    Tile t;
    t.column0 = gl_WorkGroupID.x * BLOCK_N;
    t.first = gl_WorkGroupID.z * BLOCK_M;
    t.group = gl_WorkGroupID.y;
    t.row0 = 0u;
    t.rows = 0u;
    t.a = uvec2(push.operands.a_codes);
    t.a_scales = uvec2(push.operands.a_scales);
    t.d = uvec2(push.operands.d);
    return t;
}

// Finds the rows of a group or batch, but those that come from ids.
void find_rows(inout Tile t) {
    uint g = t.group;
    if (rows_from == BATCH) {
        t.rows = push.m;
        t.a = address_add(t.a, g, push.a_batch16, 4u);
        t.a_scales = address_add(t.a_scales, g, push.a_scale_batch, 2u);
        t.d = address_add(t.d, g, push.stride_d, D_LOG2_BYTES);
    } else {
        uint end = push.operands.places.v[g + (rows_from == PREFIX ? 1u : 0u)];
        if (rows_from == MASKED) {
            t.row0 = g * push.spacing;
            t.rows = min(end, push.spacing);
        } else {
            if (rows_from != ENDS) {
                t.row0 = push.operands.places.v[g];
                end = rows_from == PREFIX ? end : push.operands.ends.v[g];
            } else if (g > 0u) {
                t.row0 = div_up(push.operands.places.v[g - 1u], push.spacing) * push.spacing;
            }
            t.rows = max(end, t.row0) - t.row0;
        }
    }
}

// Ids that exist.
uint count_of_ids() {
    return push.spacing == 0u
               ? push.m
               : min(push.operands.ends.v[0], push.m / push.spacing) * push.spacing;
}

// Of a row of the turn that exists.
uint slot_of(Tile t, uint row) {
    if (FROM_IDS) {
        return listed[FIRST_LISTED + row];
    }
    uint r = t.row0 + t.first + row;
    return a_by_slot != 0u || d_by_slot != 0u ? uint(push.operands.slots.v[r]) : r;
}
// Rows that do not exist are the last that does, and their sums go nowhere.
uint row_of_a(Tile t, uint row) {
    row = min(row, t.rows - t.first - 1u);
    if (a_by_slot == 0u) {
        return t.row0 + t.first + row;
    }
    return uint(max(int(slot_of(t, row)), 0)) / push.slots_per_a_row;
}

// Four elements of a row of the turn that exists.
void store(Tile t, uint row, uint column, vec4 x) {
    uint to = t.row0 + t.first + row;
    if (d_by_slot != 0u) {
        to = slot_of(t, row);
        if (int(to) < 0) {
            return;
        }
    }
    uint at = to * push.ldd + column;
    if (aligned != 0u) {
        store_d4(t.d, at, x, 1.0, push.accumulate != 0u);
    } else {
        store_d_part(t.d, at, x, min(push.n - column, 4u), 1.0, push.accumulate != 0u);
    }
}

#endif
