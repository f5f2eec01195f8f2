// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of bf16 operands on matrix units, dense, batched, or grouped over rows
// of A. Matrices are filled element by element from registers: those of A straight from memory, those
// of B from workgroup memory, where the subgroups of a workgroup share them.
//
// An invocation reads eight neighbouring k of a row of A or B at a time (a unit), which are the
// elements that it holds of several matrices, one after another: which k these are does not matter as
// long as it is the same for both operands. Of 2 * CHUNKS units side by side in a row every second one
// is of one segment, the others of the next: the loads of the first bring whole lines to the cache,
// where the others find them. A segment has STEPS matrices along k. Loads run ahead of what is
// multiplied: those of A by some segments; those of B by a stage, into registers, from where they go
// to one of `ring` stages in workgroup memory while the stage before is multiplied. One barrier for
// each stage is enough: with three stages in the midst of a product, with two between products.
//
// from_list 1: tile t of the work list (grouped_gemm_tiles.comp) belongs to group tiles[2t] and begins
//           at row tiles[2t + 1]; a workgroup takes the tiles that begin at multiples of BLOCK_M rows
//           in their group, with those that follow in it, and the others have nothing to do.
// from_list 0: batches of m rows of A and D.
// a, b      rows in units: lda8, ldb8, stride_b8 (of a batch entry or group), stride_a8 (of a batch
//           entry). Rows beyond the last count as the last, k from push.k on as 0.
// Variants   <matrix element>_<type of d>. bf16 operands are exact as f16 within 2^-14 .. 65504 only.
// Constants  local_size   subgroup size * warps_m * warps_n
//            mma_*        a row that the device enumerates: subgroup scope, f32 sums
//            fragments_*, warps_*   matrices per subgroup and subgroups along m and n
//            depth        segments of a stage, 1 or 2
//            ahead        segments by which loads of A run ahead, 1 or 2
//            ring         stages in workgroup memory, 2 or 3
//            together     matrices of a row that pass through workgroup memory together on their way
//                         to D: a divisor of fragments_n; the subgroup size is a multiple of together *
//                         mma_n / 4 and divides that times mma_m; PART of all subgroups fits the ring
//            per_k, a_*, b_*   matrix_images.hpp; per_k divides 8
//            flip         1: bit 0 of a column of B comes from the invocation alone
//            tail         0: k is a multiple of two segments'
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            band         tiles along m that run together
//            local_size is a multiple of depth * CHUNKS and divides the units of a stage.
// Dispatch   x = tiles of the list (indirect), or ceil(m / BLOCK_M); y: any, as long as there are
//            x * ceil(n / BLOCK_N) workgroups; z = batches.
//            Shared: ring * 16 * depth * BLOCK_N * CHUNKS bytes.
// Order      segments of k ascend, inside them k goes as per_k says, inside a matrix as the device
//            does it. An element's bits depend on its row of A and its column of B alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif
#define A_BF16 1
#define B_BF16 1
#include "include/gemm_operands.glsl"

#include "gemm_direct_nt.kernel.glsl"

layout(local_size_x_id = 0) in;

#if MATRIX_BF16
#define MATRIX_TYPE bfloat16_t
#else
#define MATRIX_TYPE float16_t
#endif
#define MATRIX_A coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_B coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

#define WARPS (warps_m * warps_n)
#define LANES (local_size / WARPS)
#define WARP_M (mma_m * fragments_m)
#define WARP_N (mma_n * fragments_n)
#define BLOCK_M (WARP_M * warps_m)
#define BLOCK_N (WARP_N * warps_n)
#define ELEMENTS_A (mma_m * mma_k / LANES)
#define ELEMENTS_B (mma_n * mma_k / LANES)
#define SLOTS_A (ELEMENTS_A / per_k)
#define SLOTS_B (ELEMENTS_B / per_k)
#define UNITS_A (fragments_m * SLOTS_A)
#define CHUNKS (mma_k / per_k)
#define STEPS (8u / per_k)

// In units. A stage has its segments one after another, a segment its columns, of which every second
// segment has neighbours in each other's place: so neither do those who write a column's units meet
// in a bank, nor those who read neighbouring columns.
#define SEGMENT (BLOCK_N * CHUNKS)
#define STAGE (depth * SEGMENT)
#define ROW (depth * CHUNKS)
#define FILLS (STAGE / local_size)
#define FILL_COLUMNS (local_size / ROW)
#define AT_ONCE (ahead > depth ? ahead : depth) // segments that are written out one after another

#define QUADS (together * mma_n / 4u)
#define PITCH (QUADS + 1u)
#define PART (mma_m * PITCH)
shared uvec4 staged[ring * STAGE];

struct Tile {
    uvec2 a; // addresses, of the batch entry or group
    uvec2 b;
    uvec2 d;
    uint row0;
    uint row_end;
    uint column0;
    uint units; // of a row
};

ACCUMULATOR sums[fragments_m * fragments_n];
uvec4 a_next[ahead * UNITS_A]; // of the segments ahead, in turns
uvec4 b_next[SLOTS_B]; // of the matrices ahead
uvec4 filling[FILLS];  // of the stage after the next
uint a_at[UNITS_A];    // where rows begin
uint fill_from[FILLS];
uint a_chunk_of_lane, fill_segment, fill_chunk, fill_to;
uint b_at[2]; // in a stage, for even and odd segments

// What the bits of an invocation's number add up to, four bits each.
uint of_lane(uint weights) {
    uint sum = 0u;
    [[unroll]] for (uint bit = 0u; bit < 7u; ++bit) {
        uint weight = weights >> 4u * bit & 15u;
        sum += weight == 0u ? 0u : (gl_SubgroupInvocationID >> bit & 1u) * weight;
    }
    return sum;
}
uint nibble(uint all, uint i) {
    return all >> 4u * i & 15u;
}

// Element i of a unit.
MATRIX_TYPE element(uvec4 unit, uint i) {
    uint pair = unit[i / 2u];
#if MATRIX_BF16
    return uintBitsToBFloat16EXT(unpack16(pair))[i % 2u];
#else
    return float16_t(i % 2u == 0u ? bf16_low(pair) : bf16_high(pair));
#endif
}

MATRIX_A matrix_a(uint set, uint i, uint step) {
    MATRIX_A m;
    [[unroll]] for (uint e = 0u; e < ELEMENTS_A; ++e) {
        uint place = nibble(a_place, e);
        m[e] = element(a_next[set * UNITS_A + i * SLOTS_A + place / per_k],
                       step * per_k + place % per_k);
    }
    return m;
}

MATRIX_B matrix_b(uint step) {
    MATRIX_B m;
    [[unroll]] for (uint e = 0u; e < ELEMENTS_B; ++e) {
        uint place = nibble(b_place, e);
        m[e] = element(b_next[place / per_k], step * per_k + place % per_k);
    }
    return m;
}

// --- Loads

// In a row.
uint unit_at(uint segment, uint chunk) {
    return segment / 2u * (2u * CHUNKS) + 2u * chunk + segment % 2u;
}

void fetch_a(Tile t, uint set, uint segment) {
    uint at = min(unit_at(segment, a_chunk_of_lane), t.units - 1u);
    [[unroll]] for (uint i = 0u; i < UNITS_A; ++i) {
        a_next[set * UNITS_A + i] = ReadUvec4(t.a).v[a_at[i] + at];
    }
}

void fetch_b(Tile t, uint stage) {
    uint at = min(unit_at(stage * depth + fill_segment, fill_chunk), t.units - 1u);
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        filling[i] = ReadUvec4(t.b).v[fill_from[i] + at];
    }
}

// What was fetched of `stage` goes to the stage in workgroup memory that begins at `to`.
void put_b(Tile t, uint stage, uint to) {
    uint at = unit_at(stage * depth + fill_segment, fill_chunk);
    bool present = tail == 0u || at < t.units;
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        staged[to + fill_to + i * FILL_COLUMNS * CHUNKS] = present ? filling[i] : uvec4(0u);
    }
}

// The matrices of B of a segment in the stage that begins at `from`.
void take_b(uint from, uint segment, uint matrix) {
    [[unroll]] for (uint i = 0u; i < SLOTS_B; ++i) {
        b_next[i] = staged[from + segment * SEGMENT + b_at[segment % 2u] +
                           (matrix * mma_n + nibble(b_slot, i)) * CHUNKS];
    }
}

// --- Products

// Multiplies the stage that begins at `now` in workgroup memory; the one after it, which is being
// put there meanwhile, begins at `next`. first: of its segments among AT_ONCE.
void multiply(Tile t, uint stage, uint first, uint now, uint next) {
    [[unroll]] for (uint segment = 0u; segment < depth; ++segment) {
        uint all = stage * depth + segment, set = (first + segment) % ahead;
        bool present = tail == 0u || unit_at(all, a_chunk_of_lane) < t.units;
        [[unroll]] for (uint i = 0u; i < UNITS_A; ++i) {
            uint at = set * UNITS_A + i;
            a_next[at] = present ? a_next[at] : uvec4(0u);
        }
        MATRIX_A a[STEPS * fragments_m];
        [[unroll]] for (uint i = 0u; i < STEPS * fragments_m; ++i) {
            a[i] = matrix_a(set, i % fragments_m, i / fragments_m);
        }
        fetch_a(t, set, all + ahead);
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            MATRIX_B b[STEPS];
            [[unroll]] for (uint step = 0u; step < STEPS; ++step) {
                b[step] = matrix_b(step);
            }
            if (ring > 2u && segment == depth - 1u && j == fragments_n / 2u) {
                barrier();
            }
            if (j + 1u < fragments_n) {
                take_b(now, segment, j + 1u);
            } else if (segment + 1u < depth) {
                take_b(now, segment + 1u, 0u);
            } else if (ring > 2u) {
                take_b(next, 0u, 0u);
            }
            [[unroll]] for (uint step = 0u; step < STEPS; ++step) {
                [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                    uint at = j * fragments_m + i;
                    sums[at] = coopMatMulAdd(a[step * fragments_m + i], b[step], sums[at]);
                }
            }
        }
    }
}

void sum_up(Tile t) {
    uint stages = div_up(t.units, 2u * CHUNKS) * 2u / depth, stage = 0u, now = 0u;
    fetch_b(t, 0u);
    [[unroll]] for (uint set = 0u; set < ahead; ++set) {
        fetch_a(t, set, set);
    }
    put_b(t, 0u, 0u);
    fetch_b(t, 1u);
    if (ring > 2u) {
        barrier();
        take_b(now, 0u, 0u);
    }
    do {
        [[unroll]] for (uint first = 0u; first < AT_ONCE; first += depth) {
            uint next = now + STAGE == ring * STAGE ? 0u : now + STAGE;
            if (ring == 2u) {
                barrier();
                take_b(now, 0u, 0u);
            }
            put_b(t, stage + 1u, next);
            fetch_b(t, stage + 2u);
            multiply(t, stage, first, now, next);
            now = next;
            ++stage;
        }
    } while (stage < stages);
}

// --- Results

void store(Tile t, uint row, uint column, vec4 x) {
    if (aligned != 0u) {
        store_d4(t.d, row * push.ldd + column, x, 1.0, push.accumulate != 0u);
    } else {
        store_d_part(t.d, row * push.ldd + column, x, min(push.n - column, 4u), 1.0,
                     push.accumulate != 0u);
    }
}

#define LANE_STORES (mma_m * QUADS / LANES)
#define ROW_STEP (LANES / QUADS)

// Each subgroup passes its matrices, some of a row at a time, through its own part of `staged`.
void store_sums(Tile t, uint first_row, uint first_column) {
    uint part = gl_SubgroupID * PART, lane = gl_SubgroupInvocationID;
    barrier(); // nobody reads B any more
    [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
        [[unroll]] for (uint j = 0u; j < fragments_n; j += together) {
            subgroup_shared_barrier();
            [[unroll]] for (uint e = 0u; e < together; ++e) {
                coopMatStore(sums[(j + e) * fragments_m + i], staged, part + e * (mma_n / 4u),
                             PITCH, gl_CooperativeMatrixLayoutRowMajor);
            }
            subgroup_shared_barrier();
            uint column = first_column + j * mma_n + lane % QUADS * 4u;
            [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
                uint in_matrix = lane / QUADS + s * ROW_STEP;
                uint row = first_row + i * mma_m + in_matrix;
                if (row < t.row_end && column < push.n) {
                    vec4 x = uintBitsToFloat(staged[part + in_matrix * PITCH + lane % QUADS]);
                    store(t, row, column, x);
                }
            }
        }
    }
}

void main() {
    // Bands of `band` tiles along m, as in gemm_coopmat_dense.glsl.
    uint b_tiles = div_up(push.n, BLOCK_N);
    uint index = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint in_band = band * b_tiles;
    uint first = index / in_band * band;
    if (first >= gl_NumWorkGroups.x) {
        return;
    }
    uint height = min(band, gl_NumWorkGroups.x - first);
    uint m_tile = first + index % in_band % height, n_tile = index % in_band / height;
    if (n_tile >= b_tiles) {
        return;
    }

    uint g = gl_WorkGroupID.z;
    Tile t;
    t.a = uvec2(push.operands.a);
    t.d = uvec2(push.operands.d);
    t.column0 = n_tile * BLOCK_N;
    t.units = push.k / 8u;
    if (push.from_list != 0u) {
        g = push.operands.tiles.v[2u * m_tile];
        t.row0 = push.operands.tiles.v[2u * m_tile + 1u];
        if ((t.row0 - push.operands.begins.v[g]) % BLOCK_M != 0u) {
            return;
        }
        t.row_end = push.operands.ends.v[g];
    } else {
        t.row0 = m_tile * BLOCK_M;
        t.row_end = push.m;
        t.a = address_add(t.a, g, push.stride_a8, 4u);
        t.d = address_add(t.d, g, push.stride_d, D_LOG2_BYTES);
    }
    t.b = address_add(uvec2(push.operands.b), g, push.stride_b8, 4u);
    t.row_end = min(t.row_end, t.row0 + BLOCK_M);

    uint first_row = t.row0 + gl_SubgroupID % warps_m * WARP_M;
    uint warp_column = gl_SubgroupID / warps_m * WARP_N;
    a_chunk_of_lane = of_lane(a_chunk);
    [[unroll]] for (uint i = 0u; i < UNITS_A; ++i) {
        uint row = i / SLOTS_A * mma_m + nibble(a_slot, i % SLOTS_A) + of_lane(a_lane);
        a_at[i] = min(first_row + row, t.row_end - 1u) * push.lda8;
    }
    [[unroll]] for (uint odd = 0u; odd < 2u; ++odd) {
        b_at[odd] = (warp_column + (of_lane(b_lane) ^ odd * flip)) * CHUNKS + of_lane(b_chunk);
    }
    uint column = gl_LocalInvocationIndex / ROW, unit = gl_LocalInvocationIndex % ROW;
    fill_segment = unit % depth;
    fill_chunk = unit / depth;
    fill_to = fill_segment * SEGMENT + (column ^ fill_segment * flip) * CHUNKS + fill_chunk;
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        fill_from[i] = min(t.column0 + column + i * FILL_COLUMNS, push.n - 1u) * push.ldb8;
    }
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    sum_up(t);
    store_sums(t, first_row, t.column0 + warp_column);
}
