// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of E4M3 codes with power-of-two scales, for some rows of A in each group:
// weights are read once, as they stand in memory, straight into the registers of matrices on units
// that take f16; rows of A are decoded once per workgroup and pass workgroup memory. Operands and
// rows_from: include/fp8_stream.glsl.
//
// Scales of both operands go into A: its codes are scaled by a power of two that says how far the
// product of a block's scales lies below the row's largest; what that makes of a sum is applied once,
// at the end. A row in which that distance exceeds what f16 holds (2^22) is computed by f32 arithmetic
// instead.
//
// Constants  local_size   subgroup size * warps_n
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            fragments_m  BLOCK_M = mma_n * fragments_m rows of A at a time
//            fragments_n, warps_n   BLOCK_N = mma_m * fragments_n * warps_n columns, divides 128
//            ahead        1: each register of weights is loaded again as soon as it is free, 2: while
//                         another block's are multiplied
//            *_lane, *_slot, *_place, *_chunk, per_k   matrix_images.hpp
//            ids_at_once  ids of each invocation that are read together
//            whole        1: k is a multiple of 128
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
// Dispatch   x = ceil(n / BLOCK_N), y = groups or batches; z = turns: BLOCK_M rows of a group each, of
//            which a workgroup takes every z-th.
//            Shared: the larger of 256 * BLOCK_M and 16 * warps_n * mma_n * (mma_m * fragments_n / 4 +
//            1), 8 * BLOCK_M bytes and a few words.
// Order      ascending blocks of 128 k; inside a block k goes as per_k says, inside a matrix it is the
//            device's. An element's bits depend on its row of A and its column of B alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"

#include "fp8_stream_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

#define LANES (local_size / warps_n)
#define BLOCK_M (mma_n * fragments_m)
#define WARP_N (mma_m * fragments_n)
#define BLOCK_N (WARP_N * warps_n)
#define PER_HALF (8u / per_k)       // matrices that half of sixteen codes is of
#define PER_SEGMENT (BLOCK_M * CHUNKS)
#define STAGED (16u * BLOCK_M)
#define PASSED (warps_n * mma_n * PITCH)
// Sixteens of codes of A, and rows' shares of the search for the largest scale, of an invocation.
#define CARRIED ((8u * BLOCK_M + local_size - 1u) / local_size)
#define SHARES (local_size > BLOCK_M ? local_size / BLOCK_M : 1u)
// Many rows leave few registers: those of a block are fetched as soon as the block before has been
// staged, and the loop has one block; measured.
#define A_LATE (ahead == 1u && fragments_m > 6u)

shared uint listed[BLOCK_M];
#define FIRST_LISTED 0u
#include "include/fp8_stream.glsl"

// uvec4 staged[SEGMENTS][2][BLOCK_M][CHUNKS]: a block of A as f16, both halves of each sixteen codes,
// so that a subgroup reads matrices without gaps; at the end sums on their way to memory.
shared uvec4 staged[STAGED > PASSED ? STAGED : PASSED];
shared uint peaks[BLOCK_M];
shared uint found_by[warps_n];
shared uint slow_rows[(BLOCK_M + 31u) / 32u];
shared uint nan_columns[(BLOCK_N + 31u) / 32u];

ACCUMULATOR sums[fragments_n * fragments_m];
uvec4 w_codes[ahead][LOADS_W * SEGMENTS];
uint w_nan[LOADS_W]; // bits as of fp8_e4m3_nan_bits
uint w_at[LOADS_W];  // where columns of B stand, codes in sixteens
uvec4 x_codes[CARRIED];
uint x_scale[CARRIED], w_scale;
uint x_at[CARRIED], scale_at[CARRIED]; // where they and their scales stand
uint x_to[CARRIED], x_peak[CARRIED], x_slow[CARRIED];

// --- Weights

void fetch_segment(uint set, Tile t, uint block, uint s) {
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        uint at = block * 8u + s * CHUNKS + of_lane(w_chunk);
        w_codes[set][i * SEGMENTS + s] = ReadUvec4(t.b).v[w_at[i] + existing(at)];
    }
}

void fetch_weights(uint set, Tile t, uint block) {
    [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
        fetch_segment(set, t, block, s);
    }
}

// --- Rows

// Lists the slots of the group's rows from t.first on, and counts all of them.
void list_rows(inout Tile t) {
    uint found = 0u, first = 0u, count = count_of_ids();
    do { // a test at the loop's head would read once more than it should: common.glsl
        uint begin = first + gl_SubgroupID * ids_at_once * LANES + gl_SubgroupInvocationID;
        uint ids[ids_at_once];
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            ids[i] = push.operands.places.v[min(begin + i * LANES, push.m - 1u)];
        }
        uvec4 all[ids_at_once];
        uint here = 0u;
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            all[i] = subgroupBallot(begin + i * LANES < count && ids[i] == t.group);
            here += subgroupBallotBitCount(all[i]);
        }
        if (gl_SubgroupInvocationID == 0u) {
            found_by[gl_SubgroupID] = here;
        }
        barrier();
        uint next = found - t.first;
        [[unroll]] for (uint w = 0u; w < warps_n; ++w) {
            next += w < gl_SubgroupID ? found_by[w] : 0u;
            found += found_by[w];
        }
        [[unroll]] for (uint i = 0u; i < ids_at_once; ++i) {
            uint at = next + subgroupBallotExclusiveBitCount(all[i]);
            if (begin + i * LANES < count && ids[i] == t.group && at < BLOCK_M) {
                listed[at] = begin + i * LANES;
            }
            next += subgroupBallotBitCount(all[i]);
        }
        first += ids_at_once * local_size;
        barrier();
    } while (first < count);
    t.rows = found;
}

uint scale_of_b(Tile t, uint block) {
    return ReadUint(t.b_scales).v[t.column0 / 128u * push.b_scale_ld + block];
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
    uint last = BLOCKS - 1u;
    for (uint i = gl_LocalInvocationIndex; i < SHARES * BLOCK_M; i += local_size) {
        uint at = (row_of_a(t, i % BLOCK_M) >> push.a_shift) * push.a_scale_ld;
        uint peak = 0u, block = i / BLOCK_M;
        do {
            [[unroll]] for (uint j = 0u; j < 8u; ++j) {
                uint b = min(block + j * SHARES, last);
                uint of_a = ReadUint(t.a_scales).v[at + b], of_b = scale_of_b(t, b);
                peak = max(peak, is_nan(max(of_a, of_b)) ? 0u : exponent_of(of_a, of_b));
            }
            block += 8u * SHARES;
        } while (block <= last);
        atomicMax(peaks[i % BLOCK_M], peak);
    }
    barrier();
}

// --- Rows of A on their way through workgroup memory

// The i-th sixteen of a block that the invocation carries, in their order there. Where none is left
// it is the last, which several write alike.
uint carried(uint i) {
    return min(i * local_size + gl_LocalInvocationIndex, 8u * BLOCK_M - 1u);
}
uint row_of_carried(uint i) {
    return carried(i) % PER_SEGMENT / CHUNKS;
}
uint chunk_of_carried(uint i) {
    return carried(i) / PER_SEGMENT * CHUNKS + carried(i) % CHUNKS;
}

void fetch_rows(Tile t, uint block) {
    [[unroll]] for (uint i = 0u; i < CARRIED; ++i) {
        x_codes[i] = ReadUvec4(t.a).v[x_at[i] + existing(block * 8u + chunk_of_carried(i))];
        x_scale[i] = ReadUint(t.a_scales).v[scale_at[i] + block];
    }
    w_scale = scale_of_b(t, block);
}

void fetch_first_rows(Tile t) {
    [[unroll]] for (uint i = 0u; i < CARRIED; ++i) {
        uint row = row_of_a(t, row_of_carried(i));
        x_at[i] = row * push.lda16;
        scale_at[i] = (row >> push.a_shift) * push.a_scale_ld;
        x_to[i] = carried(i) / PER_SEGMENT * 2u * PER_SEGMENT + carried(i) % PER_SEGMENT;
        x_slow[i] = 0u;
    }
    fetch_rows(t, 0u);
}

// What has been fetched of the block.
void stage(uint block) {
    [[unroll]] for (uint i = 0u; i < CARRIED; ++i) {
        uvec4 codes = x_codes[i];
        if (whole == 0u) {
            codes = fp8_before(codes, 16u * (block * 8u + chunk_of_carried(i)), push.k);
        }
        uint below = x_peak[i] - exponent_of(x_scale[i], w_scale);
        uint nan = fp8_e4m3_nan_bits(codes) & 0x80808080u;
        nan |= is_nan(max(x_scale[i], w_scale)) ? 1u : 0u;
        x_slow[i] |= below > SPREAD ? 1u : 0u; // with a NaN, too: so the row comes out
        uint factor = nan != 0u ? 0x7E007E00u : (30u - min(below, 29u)) * 0x04000400u;
        uvec4 low = uvec4(halves(codes.x), halves(codes.y));
        uvec4 high = uvec4(halves(codes.z), halves(codes.w));
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            low[e] = times(low[e], factor);
            high[e] = times(high[e], factor);
        }
        staged[x_to[i]] = low;
        staged[x_to[i] + PER_SEGMENT] = high;
    }
}

// --- The sum

// Weights of a block that ends behind k.
void cut_off(uint set, uint block) {
    [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
        uint at = block * 8u + s * CHUNKS + of_lane(w_chunk);
        [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
            w_codes[set][i * SEGMENTS + s] =
                fp8_before(w_codes[set][i * SEGMENTS + s], 16u * at, push.k);
        }
    }
}

// Adds the products of segment s of a block.
void multiply(uint set, Tile t, uint block, uint s) {
    uint at = s * 2u * PER_SEGMENT + of_lane(x_lane) * CHUNKS + of_lane(x_chunk);
    [[unroll]] for (uint half_ = 0u; half_ < 2u; ++half_) {
        MATRIX_W w[fragments_n * PER_HALF];
        [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
            [[unroll]] for (uint p = 0u; p < PER_HALF; ++p) {
                [[unroll]] for (uint e = 0u; e < ELEMENTS_W; ++e) {
                    uint place = nibble(w_place, e), i = n * SLOTS_W + place / per_k;
                    w[n * PER_HALF + p][e] = code_at(w_codes[set][i * SEGMENTS + s],
                                                     half_ * 8u + p * per_k + place % per_k);
                }
            }
        }
        if (half_ == 1u) {
            [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
                w_nan[i] |= fp8_e4m3_nan_bits(w_codes[set][i * SEGMENTS + s]);
            }
            if (ahead == 1u) {
                fetch_segment(set, t, min(block + 1u, BLOCKS - 1u), s);
            }
        }
        [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
            uvec4 eight[SLOTS_X];
            [[unroll]] for (uint i = 0u; i < SLOTS_X; ++i) {
                eight[i] = staged[at + half_ * PER_SEGMENT +
                                  (m * mma_n + nibble(x_slot, i)) * CHUNKS];
            }
            [[unroll]] for (uint p = 0u; p < PER_HALF; ++p) {
                MATRIX_X x;
                [[unroll]] for (uint e = 0u; e < ELEMENTS_X; ++e) {
                    uint place = nibble(x_place, e), j = p * per_k + place % per_k;
                    x[e] = unpackFloat2x16(eight[place / per_k][j / 2u])[j % 2u];
                }
                [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
                    uint i = n * fragments_m + m;
                    sums[i] = coopMatMulAdd(w[n * PER_HALF + p], x, sums[i]);
                }
            }
        }
    }
}

void multiply_block(uint set, Tile t, uint block) {
    uint next = block + 1u;
    barrier();
    // Behind a condition, because drivers move loads down to where they are wanted if they can.
    if (next < BLOCKS && !A_LATE) {
        fetch_rows(t, next);
        if (ahead == 2u) {
            fetch_weights(1u - set, t, next);
        }
    }
    if (whole == 0u && next == BLOCKS) {
        cut_off(set, block);
    }
    [[unroll]] for (uint s = 0u; s < SEGMENTS; ++s) {
        multiply(set, t, block, s);
    }
    if (next < BLOCKS) {
        barrier();
        stage(next);
        if (A_LATE) {
            fetch_rows(t, min(next + 1u, BLOCKS - 1u));
        }
    }
}

// Two blocks are written out, so that none has to move to other registers where the loop begins anew
// (A_LATE excepted).
void sum_up(Tile t) {
    [[unroll]] for (uint i = 0u; i < fragments_n * fragments_m; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        w_nan[i] = 0u;
    }
    [[unroll]] for (uint i = 0u; i < CARRIED; ++i) {
        x_peak[i] = peaks[row_of_carried(i)];
    }
    stage(0u);
    if (A_LATE) {
        fetch_rows(t, min(1u, BLOCKS - 1u));
    }
    FOR_COUNTED(i, 0u, BLOCKS) {
        multiply_block(0u, t, i);
        if (!A_LATE && i + 1u < BLOCKS) {
            multiply_block(ahead - 1u, t, i + 1u);
        }
    }
    NEXT_COUNTED(i, BLOCKS, A_LATE ? 1u : 2u)
}

void mark() {
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        if ((w_nan[i] & 0x80808080u) != 0u) {
            uint column = gl_SubgroupID * WARP_N + i / SLOTS_W * mma_m +
                          nibble(w_slot, i % SLOTS_W) + of_lane(w_lane);
            atomicOr(nan_columns[column / 32u], 1u << column % 32u);
        }
    }
    [[unroll]] for (uint i = 0u; i < CARRIED; ++i) {
        if (x_slow[i] != 0u) {
            uint row = row_of_carried(i);
            atomicOr(slow_rows[row / 32u], 1u << row % 32u);
        }
    }
}

// --- Results

bool is_slow(uint row) {
    return (slow_rows[row / 32u] >> row % 32u & 1u) != 0u;
}

// Each subgroup passes mma_n rows of its columns at a time through its own part of `staged`.
void store_sums(Tile t) {
    uint part = gl_SubgroupID * mma_n * PITCH;
    [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
        if (t.first + m * mma_n < t.rows) {
            subgroup_shared_barrier();
            [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
                coopMatStore(sums[n * fragments_m + m], staged, part + n * (mma_m / 4u), PITCH,
                             gl_CooperativeMatrixLayoutColumnMajor);
            }
            subgroup_shared_barrier();
            for (uint i = gl_SubgroupInvocationID; i < mma_n * WARP_N / 4u; i += LANES) {
                uint row = m * mma_n + i / (WARP_N / 4u), quad = i % (WARP_N / 4u);
                uint column = gl_SubgroupID * WARP_N + 4u * quad;
                if (t.first + row < t.rows && t.column0 + column < push.n && !is_slow(row)) {
                    vec4 x = uintBitsToFloat(staged[part + i / (WARP_N / 4u) * PITCH + quad]);
                    uint nan = nan_columns[column / 32u] >> column % 32u;
                    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                        x[e] = raised(x[e], int(peaks[row]) - 253);
                        x[e] = (nan >> e & 1u) != 0u ? uintBitsToFloat(FP8_NAN) : x[e];
                    }
                    store(t, row, t.column0 + column, x);
                }
            }
        }
    }
}

// One element of a slow row.
float slow_sum(Tile t, uint row, uint column) {
    float sum = 0.0;
    uint last = (push.k - 1u) / 16u, at = 0u;
    row = row_of_a(t, row);
    do {
        // In bounds even where a loop's body is run with an empty mask: common.glsl.
        uint to = min(at, last);
        uvec4 a = ReadUvec4(t.a).v[row * push.lda16 + to];
        uvec4 b = ReadUvec4(t.b).v[column * push.ldb16 + to];
        a = fp8_before(a, 16u * at, push.k);
        b = fp8_before(b, 16u * at, push.k);
        uint of_row = (row >> push.a_shift) * push.a_scale_ld + to / 8u;
        float of_a = uintBitsToFloat(ReadUint(t.a_scales).v[of_row]);
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
    for (uint row = 0u; row < BLOCK_M; ++row) {
        if (t.first + row < t.rows && is_slow(row)) {
            for (uint quad = gl_LocalInvocationIndex; quad < BLOCK_N / 4u; quad += local_size) {
                uint column = t.column0 + 4u * quad;
                vec4 x = vec4(0);
                for (uint e = 0u; e < 4u && column + e < push.n; ++e) {
                    x[e] = slow_sum(t, row, column + e);
                }
                if (column < push.n) {
                    store(t, row, column, x);
                }
            }
        }
    }
}

void clear_marks() {
    for (uint i = gl_LocalInvocationIndex; i < BLOCK_M; i += local_size) {
        peaks[i] = 0u;
    }
    for (uint i = gl_LocalInvocationIndex; i < (BLOCK_M + 31u) / 32u; i += local_size) {
        slow_rows[i] = 0u;
    }
    for (uint i = gl_LocalInvocationIndex; i < (BLOCK_N + 31u) / 32u; i += local_size) {
        nan_columns[i] = 0u;
    }
}

void main() {
    Tile t = tile_without_rows();
    if (!FROM_IDS) {
        find_rows(t);
        if (t.first >= t.rows) {
            return;
        }
    }
    t.b = address_add(uvec2(push.operands.b_codes), t.group, push.b_batch16, 4u);
    t.b_scales = address_add(uvec2(push.operands.b_scales), t.group, push.b_scale_batch, 2u);
    [[unroll]] for (uint i = 0u; i < LOADS_W; ++i) {
        uint column = t.column0 + gl_SubgroupID * WARP_N + i / SLOTS_W * mma_m +
                      nibble(w_slot, i % SLOTS_W) + of_lane(w_lane);
        w_at[i] = min(column, push.n - 1u) * push.ldb16;
    }
    do { // a test at the loop's head would read once more than it should: common.glsl
        fetch_weights(0u, t, 0u); // on their way while rows are looked for
        clear_marks();
        if (FROM_IDS) {
            list_rows(t);
        } else {
            barrier();
        }
        if (t.first < t.rows) {
            fetch_first_rows(t);
            find_peaks(t);
            sum_up(t);
            mark();
            barrier();
            store_sums(t);
            store_slow_rows(t);
            t.first += gl_NumWorkGroups.z * BLOCK_M;
            barrier();
        }
    } while (t.first < t.rows);
}
