// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of bf16 operands on matrix units, dense, batched, or grouped over rows
// of A. Matrices are filled element by element from registers: those of A straight from memory, those
// of B from workgroup memory, where the subgroups of a workgroup share them.
//
// An invocation reads eight neighbouring k of a row of A or B at a time (a unit), which are the
// elements that it holds of several matrices, one after another: which k these are does not matter as
// long as it is the same for both operands. Of 2 * CHUNKS units side by side in a row every second one
// is of one segment, the others of the next: the loads of the first bring whole lines to the cache,
// where the others find them. A segment has STEPS matrices along k. Rows of A are loaded a segment
// ahead, those of B two: they go to one of RING places in workgroup memory, of which one is being
// read, one is whole, and one was read in the segment before. One barrier for each segment is enough.
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
//            fragments_*, warps_*   matrices per subgroup, two or more along n, and subgroups along m and n
//            together     matrices of a row that pass through workgroup memory together on their way
//                         to D: a divisor of fragments_n; the subgroup size is a multiple of together *
//                         mma_n / 4 and divides that times mma_m; PART of all subgroups fits the ring
//            per_k, a_*, b_*   matrix_images.hpp; per_k divides 8
//            tail         0: k is a multiple of two segments'
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            band         tiles along m that run together
//            local_size is a multiple of CHUNKS and divides the units of a segment of B.
// Dispatch   x = tiles of the list (indirect), or ceil(m / BLOCK_M); y: any, as long as there are
//            x * ceil(n / BLOCK_N) workgroups; z = batches.
//            Shared: RING * 16 * BLOCK_N * CHUNKS bytes.
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
#include "include/matrix_slots.glsl"

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

#define RING 3u
#define SEGMENT (BLOCK_N * CHUNKS) // of B, in units, column by column
#define FILLS (SEGMENT / local_size)
#define FILL_COLUMNS (local_size / CHUNKS)
#define LAST_N (fragments_n - 1u)
#define BARRIER_N (fragments_n > 3u ? 2u : 0u) // a constant: of min() no loop is unrolled as well

#define QUADS (together * mma_n / 4u)
#define PITCH (QUADS + 1u)
#define PART (mma_m * PITCH)
shared uvec4 staged[RING * SEGMENT];

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
MATRIX_A a_now[STEPS * fragments_m];
MATRIX_B b_now[STEPS];
uvec4 a_next[UNITS_A]; // of the segment ahead
uvec4 b_next[SLOTS_B]; // of the matrices ahead
uvec4 filling[FILLS];  // of the segment after the next
uint a_at[UNITS_A];    // an invocation's places in rows, those in k included
uint fill_from[FILLS];
uint a_chunk_of_lane, fill_chunk;
uint b_at; // in a segment

// Element i of a unit.
MATRIX_TYPE element(uvec4 unit, uint i) {
    uint pair = unit[i / 2u];
#if MATRIX_BF16
    return uintBitsToBFloat16EXT(unpack16(pair))[i % 2u];
#else
    return float16_t(i % 2u == 0u ? bf16_low(pair) : bf16_high(pair));
#endif
}

MATRIX_A matrix_a(uint i, uint step) {
    MATRIX_A m;
    [[unroll]] for (uint e = 0u; e < ELEMENTS_A; ++e) {
        uint place = nibble(a_place, e);
        m[e] = element(a_next[i * SLOTS_A + place / per_k], step * per_k + place % per_k);
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

// How far to go from an invocation's place in a row, for a segment that need not be there. Without a
// tail that is the same for all, and moves the operand's address.
uint ahead_all(Tile t, uint segment) {
    return tail == 0u ? unit_at(min(segment, t.units / CHUNKS - 1u), 0u) : 0u;
}
uint ahead_one(Tile t, uint segment, uint chunk) {
    return tail == 0u ? 0u : min(unit_at(segment, chunk), t.units - 1u) - 2u * chunk;
}

void fetch_a(Tile t, uint segment) {
    uvec2 from = address_add(t.a, ahead_all(t, segment), 1u, 4u);
    uint at = ahead_one(t, segment, a_chunk_of_lane);
    [[unroll]] for (uint i = 0u; i < UNITS_A; ++i) {
        a_next[i] = ReadUvec4(from).v[a_at[i] + at];
    }
}

void fetch_b(Tile t, uint segment) {
    uvec2 from = address_add(t.b, ahead_all(t, segment), 1u, 4u);
    uint at = ahead_one(t, segment, fill_chunk);
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        filling[i] = ReadUvec4(from).v[fill_from[i] + at];
    }
}

// Whether a row has so many k.
bool present(Tile t, uint segment, uint chunk) {
    return tail == 0u || unit_at(segment, chunk) < t.units;
}

// What was fetched of A becomes the matrices of now.
void take_a(Tile t, uint segment) {
    bool is_there = present(t, segment, a_chunk_of_lane);
    [[unroll]] for (uint i = 0u; i < UNITS_A; ++i) {
        a_next[i] = is_there ? a_next[i] : uvec4(0u);
    }
    [[unroll]] for (uint i = 0u; i < STEPS * fragments_m; ++i) {
        a_now[i] = matrix_a(i % fragments_m, i / fragments_m);
    }
}

// What was fetched of B goes to the place in workgroup memory that begins at `to`.
void put_b(Tile t, uint segment, uint to) {
    bool is_there = present(t, segment, fill_chunk);
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        staged[to + gl_LocalInvocationIndex + i * local_size] = is_there ? filling[i] : uvec4(0u);
    }
}

// Of the segment that begins at `from`.
void load_b(uint from, uint matrix) {
    [[unroll]] for (uint i = 0u; i < SLOTS_B; ++i) {
        b_next[i] = staged[from + b_at + (matrix * mma_n + nibble(b_slot, i)) * CHUNKS];
    }
}

void take_b() {
    [[unroll]] for (uint step = 0u; step < STEPS; ++step) {
        b_now[step] = matrix_b(step);
    }
}

uint place_after(uint place) {
    return place == (RING - 1u) * SEGMENT ? 0u : place + SEGMENT;
}

// --- Products

// Of all rows by the j-th matrix of columns.
void multiply(uint j) {
    [[unroll]] for (uint step = 0u; step < STEPS; ++step) {
        [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
            uint at = j * fragments_m + i;
            sums[at] = coopMatMulAdd(a_now[step * fragments_m + i], b_now[step], sums[at]);
        }
    }
}

// Compilers move loads, and what takes their results, past anything but branches and barriers. So that
// nothing waits for the next segment in the midst of this one, what was loaded for it is taken behind
// the branch that ends the loop; and B's segment after the next is loaded behind the barrier, when
// the registers that it goes to have long been stored.
void sum_up(Tile t) {
    uint segments = div_up(t.units, 2u * CHUNKS) * 2u, segment = 0u, now = 0u;
    fetch_b(t, 0u);
    fetch_a(t, 0u);
    put_b(t, 0u, 0u);
    fetch_b(t, 1u);
    take_a(t, 0u);
    put_b(t, 1u, SEGMENT);
    barrier();
    load_b(now, 0u);
    for (;;) {
        uint next = place_after(now);
        fetch_a(t, segment + 1u);
        [[unroll]] for (uint j = 0u; j < LAST_N; ++j) {
            take_b();
            if (j == BARRIER_N) {
                barrier();
                fetch_b(t, segment + 2u);
            }
            load_b(now, j + 1u);
            multiply(j);
        }
        take_b();
        if (++segment == segments) {
            break;
        }
        load_b(next, 0u);
        multiply(LAST_N);
        take_a(t, segment);
        put_b(t, segment + 1u, place_after(next));
        now = next;
    }
    multiply(LAST_N);
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
        a_at[i] = min(first_row + row, t.row_end - 1u) * push.lda8 + 2u * a_chunk_of_lane;
    }
    b_at = (warp_column + of_lane(b_lane)) * CHUNKS + of_lane(b_chunk);
    fill_chunk = gl_LocalInvocationIndex % CHUNKS;
    [[unroll]] for (uint i = 0u; i < FILLS; ++i) {
        uint column = t.column0 + gl_LocalInvocationIndex / CHUNKS + i * FILL_COLUMNS;
        fill_from[i] = min(column, push.n - 1u) * push.ldb8 + 2u * fill_chunk;
    }
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    sum_up(t);
    store_sums(t, first_row, t.column0 + warp_column);
}
