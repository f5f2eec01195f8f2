// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of E4M3 codes with power-of-two scales, for few rows of A in each group:
// the codes of both operands are read once per subgroup, as they stand in memory, straight into the
// registers of matrices on units that take f16. Operands and rows_from: include/fp8_stream.glsl.
//
// Products of a block of 128 k are summed by the units, and the sum, times the block's two scales, is
// added to the element's f32 sum.
//
// Constants  local_size   subgroup size * warps_n * warps_k
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            fragments_m  BLOCK_M = mma_n * fragments_m rows of A at a time
//            fragments_n, warps_n   BLOCK_N = mma_m * fragments_n * warps_n columns, divides 128
//            warps_k      subgroups that share the blocks of k among them
//            ahead        blocks of k by which loads run ahead, at most 4
//            *_lane, *_slot, *_place, *_chunk, per_k, sum_*   matrix_images.hpp
//            ids_at_once  ids of each invocation that are read together
//            whole        1: k is a multiple of 128
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
// Dispatch   x = ceil(n / BLOCK_N), y = groups, batches or ids; z = turns: BLOCK_M rows of a group
//            each, of which a workgroup takes every z-th.
//            Shared: 16 * warps_n * warps_k * mma_n * (mma_m * fragments_n / 4 + 1) + 4 * BLOCK_M *
//            warps_n * warps_k bytes and a few words.
// Order      blocks of 128 k go round to the warps_k subgroups, which add theirs up in their order;
//            then the sums of subgroups are added in their order. Inside a block k goes as per_k says,
//            inside a matrix it is the device's. An element's bits depend on its row of A, its column
//            of B and warps_k alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"

#include "fp8_few_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

#define WARPS (warps_n * warps_k)
#define LANES (local_size / WARPS)
#define BLOCK_M (mma_n * fragments_m)
#define WARP_N (mma_m * fragments_n)
#define BLOCK_N (WARP_N * warps_n)
#define ELEMENTS (mma_m * mma_n / LANES)
#define PARTS (16u / per_k)         // matrices that sixteen codes are of
#define LOADS_X (fragments_m * SLOTS_X)
#define A_EARLY (fragments_m <= 2u) // more rows leave no registers for it

shared uint listed[WARPS * BLOCK_M];
#define FIRST_LISTED (gl_SubgroupID * BLOCK_M) // each subgroup's own
#include "include/fp8_stream.glsl"

shared uvec4 staged[WARPS * mma_n * PITCH];
shared uint nan_rows[(BLOCK_M + 31u) / 32u];
shared uint nan_columns[(BLOCK_N + 31u) / 32u];

ACCUMULATOR sums[fragments_n * fragments_m];
uvec4 w_codes[ahead][LOADS_W * SEGMENTS];
uvec4 x_codes[ahead][LOADS_X * SEGMENTS];
uint x_scale[ahead][fragments_m * sum_slots];
uint w_scale[ahead];
uint w_nan[LOADS_W]; // bits as of fp8_e4m3_nan_bits
uint x_nan[LOADS_X];
uint w_at[LOADS_W]; // where columns of B, rows of A and their scales stand, codes in sixteens
uint x_at[LOADS_X];
uint scale_at[fragments_m * sum_slots];

uint warp_n = gl_SubgroupID % warps_n, warp_k = gl_SubgroupID / warps_n;

// --- Weights, of a block of k that exists

// Those of the subgroup's n-th matrix, whole lines of memory; with the first the block's scale.
void fetch_weights(uint set, Tile t, uint block, uint n) {
    if (n == 0u) {
        w_scale[set] = ReadUint(t.b_scales).v[t.column0 / 128u * push.b_scale_ld + block];
    }
    [[unroll]] for (uint slot = 0u; slot < SLOTS_W; ++slot) {
        uint i = n * SLOTS_W + slot;
        [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
            uint at = block * 8u + s * CHUNKS + of_lane(w_chunk);
            w_codes[set][i * SEGMENTS + s] = ReadUvec4(t.b).v[w_at[i] + existing(at)];
        }
    }
}

// The first of a turn that has rows, whichever these are.
void fetch_first_weights(inout Tile t, uvec2 codes, uvec2 scales) {
    t.b = address_add(codes, t.group, push.b_batch16, 4u);
    t.b_scales = address_add(scales, t.group, push.b_scale_batch, 2u);
    [[unroll]] for (uint set = 0u; set < ahead; ++set) {
        uint block = warp_k + set * warps_k;
        if (block < BLOCKS) {
            [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
                fetch_weights(set, t, block, n);
            }
        }
    }
}

// --- Rows

// Lists the slots of the group's rows from t.first on, and counts all of them: each subgroup for
// itself. The turn's first weights are on their way as soon as a row of it is found.
void list_rows(inout Tile t) {
    uint found = 0u, first = 0u;
    uint count = count_of_ids();
    t.head = count;
    bool ours = true;
    uvec2 codes = uvec2(push.operands.b_codes); // read while the ids are on their way
    uvec2 scales = uvec2(push.operands.b_scales);
    do { // a test at the loop's head would read once more than it should: common.glsl
        uint ids[ids_at_once], found_before = found;
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            uint slot = first + i * LANES + gl_SubgroupInvocationID;
            ids[i] = push.operands.places.v[min(slot, push.m - 1u)];
        }
        bool mine[ids_at_once];
        uvec4 all[ids_at_once];
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            uint slot = first + i * LANES + gl_SubgroupInvocationID;
            mine[i] = slot < count && ids[i] == t.group;
            all[i] = subgroupBallot(mine[i]);
            if (found == 0u && subgroupBallotBitCount(all[i]) != 0u) {
                t.head = first + i * LANES + subgroupBallotFindLSB(all[i]);
            }
            found += subgroupBallotBitCount(all[i]);
        }
        // With SLOT another workgroup may have the group, or the id be of none.
        ours = rows_from != SLOT || (t.head == gl_WorkGroupID.y && t.group < push.groups);
        if (ours && found_before <= t.first && t.first < found) {
            fetch_first_weights(t, codes, scales);
        }
        uint next = found_before - t.first;
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            uint at = next + subgroupBallotExclusiveBitCount(all[i]);
            if (mine[i] && at < BLOCK_M) {
                listed[gl_SubgroupID * BLOCK_M + at] =
                    first + i * LANES + gl_SubgroupInvocationID;
            }
            next += subgroupBallotBitCount(all[i]);
        }
        first += ids_at_once * LANES;
    } while (first < count);
    subgroup_shared_barrier();
    t.rows = ours ? found : 0u;
}

// That of this workgroup; its group has no rows when there is nothing to do.
Tile tile_of_workgroup() {
    Tile t = tile_without_rows();
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        uint column = t.column0 + warp_n * WARP_N + i / SLOTS_W * mma_m +
                      nibble(w_slot, i % SLOTS_W) + of_lane(w_lane);
        w_at[i] = min(column, push.n - 1u) * push.ldb16;
    }
    if (FROM_IDS) {
        t.group = rows_from == SLOT ? push.operands.places.v[t.group] : t.group;
        list_rows(t);
    } else {
        find_rows(t);
    }
    return t;
}

// --- The sum

// Of a block of k that exists.
void fetch_rows(uint set, Tile t, uint block) {
    [[unroll]] for (uint i = 0u; i < LOADS_X; ++i) {
        [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
            uint at = block * 8u + s * CHUNKS + of_lane(x_chunk);
            x_codes[set][i * SEGMENTS + s] = ReadUvec4(t.a).v[x_at[i] + existing(at)];
        }
    }
    [[unroll]] for (uint i = 0u; i < fragments_m * sum_slots; ++i) {
        x_scale[set][i] = ReadUint(t.a_scales).v[scale_at[i] + block];
    }
}

float power_of_two(int exponent) {
    return uintBitsToFloat(uint(127 + exponent) << 23);
}

// Codes of a block that ends behind k.
void cut_off(uint set, uint block) {
    uint chunk_w = of_lane(w_chunk), chunk_x = of_lane(x_chunk);
    [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
        uint at = block * 8u + s * CHUNKS;
        [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
            w_codes[set][i * SEGMENTS + s] =
                fp8_before(w_codes[set][i * SEGMENTS + s], 16u * (at + chunk_w), push.k);
        }
        [[unroll]] for (uint i = 0u; i < LOADS_X; ++i) {
            x_codes[set][i * SEGMENTS + s] =
                fp8_before(x_codes[set][i * SEGMENTS + s], 16u * (at + chunk_x), push.k);
        }
    }
}

// Adds a block's products. Registers that are done with take block `next`, if there is one: A's,
// and the weights of one matrix after another.
void multiply(uint set, Tile t, uint block, uint next) {
    if (whole == 0u && block * 128u + 128u > push.k) {
        cut_off(set, block);
    }
    MATRIX_X x[SEGMENTS * PARTS * fragments_m];
    [[unroll]] for (uint p = 0u; p < SEGMENTS * PARTS; ++p) {
        [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
            [[unroll]] for (uint e = 0u; e < ELEMENTS_X; ++e) {
                uint place = nibble(x_place, e), i = m * SLOTS_X + place / per_k;
                x[p * fragments_m + m][e] = code_at(x_codes[set][i * SEGMENTS + p / PARTS],
                                                    p % PARTS * per_k + place % per_k);
            }
        }
    }
    [[unroll]] for (uint i = 0u; i < LOADS_X * SEGMENTS; ++i) {
        x_nan[i / SEGMENTS] |= fp8_e4m3_nan_bits(x_codes[set][i]);
    }
    // In two factors, so that none leaves the range unless the result does.
    float first[fragments_m * sum_slots], second[fragments_m * sum_slots];
    [[unroll]] for (uint i = 0u; i < fragments_m * sum_slots; ++i) {
        uint scale = x_scale[set][i];
        int exponent = int((scale >> 23) + (w_scale[set] >> 23)) - 238;
        int some = exponent >> 1;
        first[i] = power_of_two(min(some, 127));
        second[i] = power_of_two(min(exponent - some, 127));
        if (max(scale, w_scale[set]) > FP8_INFINITY) {
            first[i] = uintBitsToFloat(FP8_NAN);
        }
    }
    if (A_EARLY && next < BLOCKS) {
        fetch_rows(set, t, next);
    }
    [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
        ACCUMULATOR of_block[fragments_m];
        [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
            of_block[m] = ACCUMULATOR(0.0);
        }
        [[unroll]] for (uint p = 0u; p < SEGMENTS * PARTS; ++p) {
            MATRIX_W w;
            [[unroll]] for (uint e = 0u; e < ELEMENTS_W; ++e) {
                uint place = nibble(w_place, e), i = n * SLOTS_W + place / per_k;
                w[e] = code_at(w_codes[set][i * SEGMENTS + p / PARTS],
                               p % PARTS * per_k + place % per_k);
            }
            [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
                of_block[m] = coopMatMulAdd(w, x[p * fragments_m + m], of_block[m]);
            }
        }
        [[unroll]] for (uint l = 0u; l < SLOTS_W * SEGMENTS; ++l) {
            uint i = n * SLOTS_W * SEGMENTS + l;
            w_nan[i / SEGMENTS] |= fp8_e4m3_nan_bits(w_codes[set][i]);
        }
        if (next < BLOCKS) {
            fetch_weights(set, t, next, n);
        }
        [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
            [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) {
                uint at = n * fragments_m + m, i = m * sum_slots + nibble(sum_place, e);
                precise float scaled = of_block[m][e] * first[i];
                sums[at][e] = fma(scaled, second[i], sums[at][e]);
            }
        }
    }
    if (!A_EARLY && next < BLOCKS) {
        fetch_rows(set, t, next);
    }
}

// Finds the turn's rows, and loads their first codes.
void fetch_first_rows(Tile t) {
    [[unroll]] for (uint i = 0u; i < LOADS_X; ++i) {
        uint row = i / SLOTS_X * mma_n + nibble(x_slot, i % SLOTS_X) + of_lane(x_lane);
        x_at[i] = row_of_a(t, row) * push.lda16;
        x_nan[i] = 0u;
    }
    [[unroll]] for (uint i = 0u; i < fragments_m * sum_slots; ++i) {
        uint row = i / sum_slots * mma_n + nibble(sum_slot, i % sum_slots) + of_lane(sum_lane);
        scale_at[i] = (row_of_a(t, row) >> push.a_shift) * push.a_scale_ld;
    }
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        w_nan[i] = 0u;
    }
    [[unroll]] for (uint set = 0u; set < ahead; ++set) {
        if (warp_k + set * warps_k < BLOCKS) {
            fetch_rows(set, t, warp_k + set * warps_k);
        }
    }
}

// The sets of blocks are written out, as drivers find a loop over them too long to unroll: they would
// stand in memory, indexed by its counter. Calls of one function that makes sure of every block, the
// first too, gain nothing either.
void sum_up(Tile t) {
    [[unroll]] for (uint i = 0u; i < fragments_n * fragments_m; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    FOR_COUNTED(i, warp_k, BLOCKS) {
        multiply(0u, t, i, i + ahead * warps_k);
        if (ahead > 1u && i + warps_k < BLOCKS) {
            multiply(1u, t, i + warps_k, i + (ahead + 1u) * warps_k);
        }
        if (ahead > 2u && i + 2u * warps_k < BLOCKS) {
            multiply(2u, t, i + 2u * warps_k, i + (ahead + 2u) * warps_k);
        }
        if (ahead > 3u && i + 3u * warps_k < BLOCKS) {
            multiply(3u, t, i + 3u * warps_k, i + (ahead + 3u) * warps_k);
        }
    }
    NEXT_COUNTED(i, BLOCKS, ahead * warps_k)
}

void mark_nans() {
    uint any = 0u;
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        any |= w_nan[i];
    }
    [[unroll]] for (uint i = 0u; i < LOADS_X; ++i) {
        any |= x_nan[i];
    }
    if ((any & 0x80808080u) == 0u) {
        return;
    }
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        if ((w_nan[i] & 0x80808080u) != 0u) {
            uint column = warp_n * WARP_N + i / SLOTS_W * mma_m + nibble(w_slot, i % SLOTS_W) +
                          of_lane(w_lane);
            atomicOr(nan_columns[column / 32u], 1u << column % 32u);
        }
    }
    [[unroll]] for (uint i = 0u; i < LOADS_X; ++i) {
        if ((x_nan[i] & 0x80808080u) != 0u) {
            uint row = i / SLOTS_X * mma_n + nibble(x_slot, i % SLOTS_X) + of_lane(x_lane);
            atomicOr(nan_rows[row / 32u], 1u << row % 32u);
        }
    }
}

// --- Results

// All subgroups pass their matrices of mma_n rows; those of a column are added in their order.
void store_sums(Tile t) {
    [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
        if (t.first + m * mma_n >= t.rows) {
            return;
        }
        if (m > 0u) {
            barrier();
        }
        [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
            coopMatStore(sums[n * fragments_m + m], staged,
                         gl_SubgroupID * mma_n * PITCH + n * (mma_m / 4u), PITCH,
                         gl_CooperativeMatrixLayoutColumnMajor);
        }
        barrier();
        for (uint i = gl_LocalInvocationIndex; i < mma_n * BLOCK_N / 4u; i += local_size) {
            uint quad = i % (BLOCK_N / 4u), row = m * mma_n + i / (BLOCK_N / 4u);
            uint column = 4u * quad;
            if (t.first + row < t.rows && t.column0 + column < push.n) {
                uint at = (quad / (WARP_N / 4u) * mma_n + i / (BLOCK_N / 4u)) * PITCH +
                          quad % (WARP_N / 4u);
                vec4 x = uintBitsToFloat(staged[at]);
                [[unroll]] for (uint w = 1u; w < warps_k; ++w) {
                    x += uintBitsToFloat(staged[w * warps_n * mma_n * PITCH + at]);
                }
                uint nan = nan_columns[column / 32u] >> column % 32u |
                           (0u - (nan_rows[row / 32u] >> row % 32u & 1u));
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    x[e] = (nan >> e & 1u) != 0u ? uintBitsToFloat(FP8_NAN) : x[e];
                }
                store(t, row, t.column0 + column, x);
            }
        }
    }
}

void main() {
    Tile t = tile_of_workgroup();
    if (t.first >= t.rows) {
        return;
    }
    do { // a test at the loop's head would read once more than it should: common.glsl
        if (!FROM_IDS) { // list_rows has
            fetch_first_weights(t, uvec2(push.operands.b_codes), uvec2(push.operands.b_scales));
        }
        fetch_first_rows(t);
        for (uint i = gl_LocalInvocationIndex; i < (BLOCK_N + 31u) / 32u; i += local_size) {
            nan_columns[i] = 0u;
        }
        for (uint i = gl_LocalInvocationIndex; i < (BLOCK_M + 31u) / 32u; i += local_size) {
            nan_rows[i] = 0u;
        }
        barrier();
        sum_up(t);
        mark_nans();
        store_sums(t);
        t.first += gl_NumWorkGroups.z * BLOCK_M;
        if (t.first < t.rows) {
            barrier();
            if (FROM_IDS) {
                list_rows(t);
            }
        }
    } while (t.first < t.rows);
}
