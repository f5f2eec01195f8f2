// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of packed E4M3 operands (include/fp8_packed.glsl) on matrix units that
// take f16. 128 x 128 * wide elements of D per workgroup. Matrices go straight from memory to registers,
// without workgroup memory: those of A as they are, B's codes become f16 times 2^-8 by shifts, then
// a power of two that says how far their block's scale lies below the peak. What the peaks make of a
// sum is applied once, at the end. Where scales of a tile differ by more than f16 can hold the
// workgroup takes a slow loop that scales the sum of each block.
//
// rows    (by_sum 0) tile t of A times the tiles of B of its group, over all blocks. from_list: the
//         group is tiles[2t], its rows of D go from tiles[2t + 1] to ends[group], row r to row
//         slots[r] with d_by_slot (-1: nowhere); otherwise t counts the tiles of a batch of m rows each.
// sums    (by_sum 1) D[g] = sum over the blocks of group g, which begin at begins[g] / 128 + g and
//         hold rows up to ends[g]; an empty group leaves D[g] when accumulating and clears it else.
// Constants  local_size   subgroup * warps_m * warps_n * warps_k
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            wide         tiles of B side by side, whose subgroups share A's matrices through the
//                         first-level cache; more than one only with warps_k 1
//            fragments_*, warps_*   mma * fragments * warps = 128 * wide along n, a divisor of 128 along
//                         m, where the workgroup takes one part of its tile after another while there
//                         are rows; blocks of k go around among warps_k subgroups
//            together     matrices of a row that pass through workgroup memory together: a divisor of
//                         fragments_n; subgroup * warps_k is a multiple of together * mma_n / 4 and
//                         divides that times mma_m
//            exact        1: matrices without rows are left out; warps_k is 1, fragments_m is at most
//                         4, and warps_m times it need not divide what a tile has
//            b_ahead      steps by which loads of B run ahead, at most 4; those of A by one
//            own_scales   1: every column of B has its own scales; 0: a block of B has one
//            by_rows      1: A was packed by fp8_pack_rows
//            d_by_slot    1: rows of D are slots
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            at_once      steps that are written out one after another: a divisor of 4
//            band         rows of tiles that run together
// Dispatch   x = tiles of A (indirect with from_list), of one batch entry or group without; y =
//            ceil(n / 128), whatever `wide` is; z = batch or groups. Shared at most 18 KiB: two
//            workgroups share a processor that has 48.
// Order      k in steps of mma_k, inside which it is the device's, of each warps_k-th block; then the
//            sums of the subgroups in turn. An element's bits depend on its row of A and its column
//            of B alone, but where the slow loop runs.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"
#include "include/fp8_packed.glsl"

#include "fp8_packed_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

#define UNITS_A (DEPTHS * ELEMENTS_A / 8u)  // of 16 bytes: a row of matrices of a step
#define UNITS_B (DEPTHS * ELEMENTS_B / 16u)
#define FACTORS (own_scales != 0u ? fragments_n * ELEMENTS_B / 8u : 1u)
#define PARTS_A (fragments_m * UNITS_A)
#define PARTS_B (fragments_n * UNITS_B)
#define MATRIX_A coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_B coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

// Matrices of D that a subgroup stores together, in units of 16 bytes, and padding.
#define QUADS (together * mma_n / 4u)
#define PITCH (QUADS + 1u)
#define PART (mma_m * PITCH)
#define WARPS (warps_m * warps_n)
shared uvec4 staged[WARPS * warps_k * PART];

struct Tile {
    uint a;       // first unit of A's and B's images and of B's factors
    uint b;
    uint factors;
    uint a_scale; // first of their scales, first of their peaks
    uint b_scale;
    uint a_peak;
    uint b_peak;
    uint blocks;  // of 128 k
};

struct Place {
    uvec2 d;
    uint row0; // of D
    uint row_end;
    uint column0;
    uint first_m; // the subgroup's first matrix along m in the tile; each warps_m-th is its own
    uint own_m;   // with exact: how many of its matrices have rows, the first ones
    uint warp_n;  // its first column in a tile of B
    uint warp_k;
};

ACCUMULATOR sums[fragments_m * fragments_n];
uvec4 a_image[PARTS_A]; // of this step and those ahead
uvec4 b_image[PARTS_B];
uvec4 a_next[PARTS_A];
uvec4 b_next[b_ahead * PARTS_B];
AImageOperand a_memory; // whose addresses stand in memory, too
BImageOperand b_memory;
uvec4 factors[FACTORS]; // of this block and, where there is one, of the next
uvec4 next_factors[FACTORS];

MATRIX_A matrix_a(uint i, uint depth) {
    MATRIX_A m;
    [[unroll]] for (uint u = 0u; u < ELEMENTS_A / 8u; ++u) {
        uvec4 part = a_image[i * UNITS_A + depth * (ELEMENTS_A / 8u) + u];
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            f16vec2 two = unpackFloat2x16(part[q]);
            m[u * 8u + 2u * q] = two.x;
            m[u * 8u + 2u * q + 1u] = two.y;
        }
    }
    return m;
}

// The first and the second two codes of a packed word as f16 times 2^-8.
uvec2 packed_halves(uint word) {
    return uvec2(word & 0xBF80BF80u, word << 7 & 0x3F803F80u | word << 1 & 0x80008000u);
}

f16vec2 scaled(uint pair, uint factor) {
    return unpackFloat2x16(pair) * unpackFloat2x16(factor);
}

MATRIX_B matrix_b(uint j, uint depth) {
    MATRIX_B m;
    [[unroll]] for (uint w = 0u; w < ELEMENTS_B / 4u; ++w) {
        uint word = depth * (ELEMENTS_B / 4u) + w;
        uvec2 y = packed_halves(b_image[j * UNITS_B + word / 4u][word % 4u]);
        uint at = own_scales != 0u ? j * (ELEMENTS_B / 8u) + w / 2u : 0u;
        uint first = own_scales != 0u ? w % 2u * 2u : 0u, second = own_scales != 0u ? first + 1u : 0u;
        f16vec2 two = scaled(y.x, factors[at][first]);
        m[4u * w] = two.x;
        m[4u * w + 1u] = two.y;
        two = scaled(y.y, factors[at][second]);
        m[4u * w + 2u] = two.x;
        m[4u * w + 3u] = two.y;
    }
    return m;
}

void fetch_factors(Tile t, uint block) {
    if (own_scales == 0u) {
        next_factors[0] = uvec4(packed_factor(push.operands.b_peaks.v[t.b_peak],
                                         push.operands.b_scales.v[t.b_scale + block * TILE]));
    } else {
        uint stride = TILE / mma_n * (ELEMENTS_B / 8u) * subgroup;
        [[unroll]] for (uint i = 0u; i < FACTORS; ++i) {
            next_factors[i] = push.operands.b_factors.v[t.factors + block * stride + i * subgroup];
        }
    }
}

// A's unit u of the subgroup's i-th matrix of a step.
uint unit_a(uint i, uint u) {
    return (i * warps_m * UNITS_A + u) * subgroup;
}

void fetch_b(Tile t, uint set, uint step) {
    [[unroll]] for (uint i = 0u; i < PARTS_B; ++i) {
        b_next[set * PARTS_B + i] = b_memory.v[t.b + step * (B_BLOCK / 4u) + i * subgroup];
    }
}

#define OWN fragments_m
#define LOOP(name) name
#include "include/fp8_packed_loop.glsl"
#undef OWN
#undef LOOP
#define OWN (fragments_m - 1u)
#define LOOP(name) name##_less_1
#include "include/fp8_packed_loop.glsl"
#undef OWN
#undef LOOP
#define OWN (fragments_m - 2u)
#define LOOP(name) name##_less_2
#include "include/fp8_packed_loop.glsl"
#undef OWN
#undef LOOP
#define OWN (fragments_m - 3u)
#define LOOP(name) name##_less_3
#include "include/fp8_packed_loop.glsl"
#undef OWN
#undef LOOP

// Loops written out for each number of matrices, as branches inside of one would cost more.
void multiply_own(Tile t, Place p) {
    if (exact == 0u || p.own_m == fragments_m) {
        multiply(t, p);
    } else if (fragments_m > 1u && p.own_m + 1u == fragments_m) {
        multiply_less_1(t, p);
    } else if (fragments_m > 2u && p.own_m + 2u == fragments_m) {
        multiply_less_2(t, p);
    } else if (fragments_m > 3u && p.own_m + 3u == fragments_m) {
        multiply_less_3(t, p);
    }
}

// value * 2^exponent, where no step of it leaves the range unless the result does.
float raised(float value, int exponent) {
    int some = exponent >> 1;
    precise float x = value * uintBitsToFloat(uint(127 + some) << 23);
    x = x * uintBitsToFloat(uint(127 + exponent - some) << 23);
    return x;
}

int exponent_of(uint scale) {
    return int(scale >> 23) - 127;
}

// The row of D that the tile's is, or -1.
int row_of_d(Place p, uint row) {
    if (p.row0 + row >= p.row_end) {
        return -1;
    }
    return d_by_slot != 0u ? push.operands.slots.v[p.row0 + row] : int(p.row0 + row);
}

void store(uvec2 d, uint row, uint column, vec4 x) {
    if (aligned != 0u) {
        store_d4(d, row * push.ldd + column, x, 1.0, push.accumulate != 0u);
    } else {
        store_d_part(d, row * push.ldd + column, x, min(push.n - column, 4u), 1.0,
                     push.accumulate != 0u);
    }
}

void subgroup_shared_barrier() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
                   gl_SemanticsAcquireRelease);
}

// Among the subgroups that share matrices of D.
void sharers_barrier() {
    if (warps_k > 1u) {
        barrier();
    } else {
        subgroup_shared_barrier();
    }
}

// A lane's share of matrices that are stored together: columns are the same in every row.
#define LANE_STORES (mma_m * QUADS / (subgroup * warps_k))
#define ROW_STEP (subgroup * warps_k / QUADS)
#define COLUMNS (fragments_n / together)

// Each subgroup passes its matrices, some of a row at a time, through its own part of `staged`;
// those of several subgroups along k are added up in turn.
void store_sums(Tile t, Place p) {
    uint warp = gl_SubgroupID % WARPS, part = gl_SubgroupID * PART;
    uint lane = p.warp_k * subgroup + gl_SubgroupInvocationID;
    uint first_column = p.warp_n + lane % QUADS * 4u;
    ivec4 of_column[COLUMNS];
    [[unroll]] for (uint j = 0u; j < COLUMNS; ++j) {
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            uint x = own_scales != 0u ? first_column + j * together * mma_n + e : 0u;
            of_column[j][e] = exponent_of(push.operands.b_peaks.v[t.b_peak + x]) - 14;
        }
    }
    [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
        // Not `continue`: where a compiler leaves a loop as it is, its matrices stand in memory.
        if (exact == 0u || i < p.own_m) {
            uint first_row = (p.first_m + i * warps_m) * mma_m + lane / QUADS;
            int of_row[LANE_STORES], rows[LANE_STORES];
            [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
                rows[s] = row_of_d(p, first_row + s * ROW_STEP);
                of_row[s] = exponent_of(push.operands.a_peaks.v[t.a_peak + first_row + s * ROW_STEP]);
            }
            [[unroll]] for (uint j = 0u; j < COLUMNS; ++j) {
                uint column = first_column + j * together * mma_n;
                sharers_barrier();
                [[unroll]] for (uint e = 0u; e < together; ++e) {
                    coopMatStore(sums[(j * together + e) * fragments_m + i], staged,
                                 part + e * (mma_n / 4u), PITCH, gl_CooperativeMatrixLayoutRowMajor);
                }
                sharers_barrier();
                [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
                    if (rows[s] >= 0 && p.column0 + column < push.n) {
                        uint at = (lane / QUADS + s * ROW_STEP) * PITCH + lane % QUADS;
                        vec4 x = uintBitsToFloat(staged[warp * PART + at]);
                        [[unroll]] for (uint k = 1u; k < warps_k; ++k) {
                            x += uintBitsToFloat(staged[(k * WARPS + warp) * PART + at]);
                        }
                        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                            x[e] = raised(x[e], of_row[s] + of_column[j][e]);
                        }
                        store(p.d, uint(rows[s]), p.column0 + column, x);
                    }
                }
            }
        }
    }
}

// The slow loop, of one row of matrices after another.
#define LANE_QUADS (mma_m * mma_n / 4u / subgroup)

ACCUMULATOR sum_of_block(Tile t, uint i, uint j, uint block) {
    ACCUMULATOR sum = ACCUMULATOR(0.0);
    for (uint step = block * 4u; step < block * 4u + 4u; ++step) {
        [[unroll]] for (uint u = 0u; u < UNITS_A; ++u) {
            a_image[u] = push.operands.a_image.v[t.a + step * (A_BLOCK / 4u) +
                                                 unit_a(i, u)];
        }
        [[unroll]] for (uint u = 0u; u < UNITS_B; ++u) {
            b_image[u] = push.operands.b_image.v[t.b + step * (B_BLOCK / 4u) +
                                                 (j * UNITS_B + u) * subgroup];
        }
        [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
            sum = coopMatMulAdd(matrix_a(0u, depth), matrix_b(0u, depth), sum);
        }
    }
    return sum;
}

void store_slowly(Tile t, Place p, uint wide_parts) {
    uint part = gl_SubgroupID * PART;
    [[unroll]] for (uint f = 0u; f < FACTORS; ++f) {
        factors[f] = uvec4(0x3C003C00u); // ones: sums are scaled instead
    }
    for (uint ij = p.warp_k; ij < fragments_m * fragments_n; ij += warps_k) {
        uint i = ij % fragments_m, j = ij / fragments_m;
        if (exact != 0u && i >= p.own_m) {
            continue;
        }
        vec4 sum[LANE_QUADS];
        [[unroll]] for (uint q = 0u; q < LANE_QUADS; ++q) {
            sum[q] = vec4(0);
        }
        for (uint block = 0u; block < t.blocks; ++block) {
            ACCUMULATOR of_block = sum_of_block(t, i, j, block);
            subgroup_shared_barrier();
            coopMatStore(of_block, staged, part, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
            subgroup_shared_barrier();
            [[unroll]] for (uint q = 0u; q < LANE_QUADS; ++q) {
                uint quad = q * subgroup + gl_SubgroupInvocationID;
                uint row = (p.first_m + i * warps_m) * mma_m + quad / (mma_n / 4u);
                uint column = p.warp_n + j * mma_n + quad % (mma_n / 4u) * 4u;
                bool is_scaled = (wide_parts >> row / SPREAD_ROWS & 1u) == 0u;
                uint a = is_scaled ? push.operands.a_peaks.v[t.a_peak + row]
                                   : push.operands.a_scales.v[t.a_scale + block * TILE + row];
                vec4 x = uintBitsToFloat(staged[part + quad]);
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    uint b = push.operands.b_scales.v[t.b_scale + block * TILE + column + e];
                    float y = raised(x[e], exponent_of(a) + exponent_of(b) + 1);
                    sum[q][e] += max(a, b) > FP8_INFINITY ? uintBitsToFloat(FP8_NAN) : y;
                }
            }
        }
        [[unroll]] for (uint q = 0u; q < LANE_QUADS; ++q) {
            uint quad = q * subgroup + gl_SubgroupInvocationID;
            uint row = (p.first_m + i * warps_m) * mma_m + quad / (mma_n / 4u);
            uint column = p.warp_n + j * mma_n + quad % (mma_n / 4u) * 4u;
            int to = row_of_d(p, row);
            if (to >= 0 && p.column0 + column < push.n) {
                store(p.d, uint(to), p.column0 + column, sum[q]);
            }
        }
    }
}

// Bits of SPREAD_ROWS rows of A each whose scales f16 cannot hold.
uint wide_parts(uint unit, uint rows) {
    if (by_rows == 0u) {
        return push.operands.a_spread.v[unit] > SPREAD ? 15u : 0u;
    }
    uint parts = 0u;
    [[unroll]] for (uint part = 0u; part < TILE / SPREAD_ROWS; ++part) {
        bool wide = part * SPREAD_ROWS < rows &&
                    push.operands.a_spread.v[unit * (TILE / SPREAD_ROWS) + part] > SPREAD;
        parts |= wide ? 1u << part : 0u;
    }
    return parts;
}

void main() {
    // Bands of `band` tiles along m, as in gemm_coopmat_dense.glsl.
    uint b_tiles = gl_NumWorkGroups.y;
    uint index = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint abreast = (b_tiles + wide - 1u) / wide, in_band = band * abreast;
    if (index >= gl_NumWorkGroups.x * abreast) {
        return;
    }
    uint first = index / in_band * band;
    uint height = min(band, gl_NumWorkGroups.x - first);
    uint m_tile = first + index % in_band % height, n_tile = index % in_band / height * wide;

    uint warp = gl_SubgroupID % WARPS, matrix_n = warp / warps_m * fragments_n;
    n_tile += matrix_n / (TILE / mma_n);
    matrix_n %= TILE / mma_n;

    Tile t;
    Place p;
    p.d = uvec2(push.operands.d);
    p.column0 = n_tile * TILE; // beyond n where there is no such tile of B
    n_tile = min(n_tile, b_tiles - 1u);
    p.warp_k = gl_SubgroupID / WARPS;
    p.warp_n = matrix_n * mma_n;
    uint a_unit = m_tile, b_unit, b_tile = n_tile, begin = 0u;
    if (by_sum != 0u) {
        uint g = gl_WorkGroupID.z;
        uint k = push.operands.begins.v[g];
        uint rows = push.operands.ends.v[g] - k;
        if (rows == 0u && push.accumulate != 0u) {
            return;
        }
        begin = k / 128u + g;
        t.blocks = (rows + 127u) / 128u;
        p.row0 = m_tile * TILE;
        p.row_end = push.m;
        a_unit += g * gl_NumWorkGroups.x;
        b_unit = g * b_tiles + n_tile;
        p.d = address_add(p.d, g, push.stride_d, D_LOG2_BYTES);
    } else {
        uint g = gl_WorkGroupID.z;
        p.row0 = m_tile * TILE;
        p.row_end = push.m;
        if (push.from_list != 0u) {
            g = push.operands.tiles.v[2u * m_tile];
            p.row0 = push.operands.tiles.v[2u * m_tile + 1u];
            p.row_end = push.operands.ends.v[g];
        } else {
            m_tile += g * gl_NumWorkGroups.x;
            a_unit = m_tile;
            p.d = address_add(p.d, g, push.stride_d, D_LOG2_BYTES);
        }
        t.blocks = push.blocks;
        b_tile += g * b_tiles;
        b_unit = b_tile;
    }
    uint a_block = m_tile * push.blocks + begin, b_block = b_tile * push.blocks + begin;
    t.a_scale = a_block * TILE;
    t.b_scale = b_block * TILE;
    t.b = b_block * B_BLOCK + matrix_n * UNITS_B * subgroup + gl_SubgroupInvocationID;
    t.factors = (b_block * (TILE / mma_n) + matrix_n) * (ELEMENTS_B / 8u) * subgroup +
                gl_SubgroupInvocationID;
    t.a_peak = a_unit * TILE;
    t.b_peak = b_unit * TILE;
    a_memory = push.operands.a_image;
    b_memory = push.operands.b_image;

    p.row_end = min(p.row_end, p.row0 + TILE);
    uint wide_a = wide_parts(a_unit, p.row_end - p.row0);
    bool slowly = t.blocks == 0u || wide_a != 0u || push.operands.b_spread.v[b_unit] > SPREAD;
    const uint MATRICES = fragments_m * warps_m;
    uint with_rows = (p.row_end - p.row0 + mma_m - 1u) / mma_m;
    for (uint m = 0u; m < with_rows; m += MATRICES) {
        p.first_m = m + warp % warps_m;
        p.own_m = min((with_rows + warps_m - 1u - p.first_m) / warps_m, fragments_m);
        t.a = a_block * A_BLOCK + p.first_m * UNITS_A * subgroup + gl_SubgroupInvocationID;
        if (slowly) {
            store_slowly(t, p, wide_a);
            continue;
        }
        [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
            sums[i] = ACCUMULATOR(0.0);
        }
        multiply_own(t, p);
        store_sums(t, p);
    }
}
