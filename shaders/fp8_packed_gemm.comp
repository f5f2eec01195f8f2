// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of packed E4M3 operands (include/fp8_packed.glsl) on matrix units that
// take f16. 128 x 128 * wide elements of D per workgroup. Matrices go straight from memory to registers,
// without workgroup memory: those of A as they are, B's codes become f16 times 2^-8 by shifts, then
// a power of two that says how far their block's scale lies below the peak. What the peaks make of a
// sum is applied once, at the end. Where scales of a tile differ by more than f16 can hold the
// workgroup takes a slow loop that scales the sum of each block.
//
// rows    (by_sum 0) tile t of A times the tiles of B of its group, over all blocks. rows_from LIST:
//         the group is tiles[2t], its rows of D go from tiles[2t + 1] to ends[group], row r to row
//         slots[r] with d_by_slot (-1: nowhere); otherwise t counts the tiles of a batch of m rows
//         each, of which there are ends[entry] with COUNTS.
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
//            b_ahead      steps by which loads of B run ahead, at most 4; those of A by one
//            b_slots, b_slot   include/fp8_packed.glsl
//            own_scales   1: every column of B has its own scales; 0: a block of B has one
//            by_rows      1: A was packed by fp8_pack_rows
//            d_by_slot    1: rows of D are slots
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            at_once      steps that are written out one after another: a divisor of 4
//            band         rows of tiles that run together
// Dispatch   x = tiles of A (indirect with LIST), of one batch entry or group without; y =
//            ceil(n / 128), whatever `wide` is; z = batch or groups. Shared at most 18 KiB of four
//            subgroups: two workgroups share a processor that has 48.
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
#define FACTORS (own_scales != 0u ? fragments_n * FACTOR_WORDS : 1u)
#define FACTORS_AHEAD (FACTORS <= 4u) // more would take the registers that other loads ahead need
// What the first step wants is loaded before anything that waits, which short sums gain by; with
// factors of columns, as in sums over rows, the registers that this takes cost more than it gains.
#define FIRST_EARLY (own_scales == 0u)
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
    uint a;       // first unit of A's and B's images, first of B's factors
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
uint factors[FACTORS]; // of this block and, where they are few, of the next
uint next_factors[FACTORS];

MATRIX_A matrix_a(uint i, uint depth) {
    MATRIX_A m;
    [[unroll]] for (uint u = 0u; u < ELEMENTS_A / 8u; ++u) {
        uvec4 part = in_registers(a_image[i * UNITS_A + depth * (ELEMENTS_A / 8u) + u]);
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

float16_t factor_of(uint j, uint slot) {
    return unpackFloat2x16(factors[j * FACTOR_WORDS + slot / 2u])[slot % 2u];
}

// Elements e and e + 1 of matrix j, whose codes are packed_halves.
f16vec2 scaled(uint pair, uint j, uint e) {
    f16vec2 x = unpackFloat2x16(pair);
    if (own_scales == 0u) {
        return x * unpackFloat2x16(factors[0]);
    }
    return x * f16vec2(factor_of(j, COLUMN_SLOT(e)), factor_of(j, COLUMN_SLOT(e + 1u)));
}

MATRIX_B matrix_b(uint j, uint depth) {
    MATRIX_B m;
    [[unroll]] for (uint w = 0u; w < ELEMENTS_B / 4u; ++w) {
        uint word = depth * (ELEMENTS_B / 4u) + w;
        uvec2 y = packed_halves(b_image[j * UNITS_B + word / 4u][word % 4u]);
        f16vec2 two = scaled(y.x, j, 4u * w);
        m[4u * w] = two.x;
        m[4u * w + 1u] = two.y;
        two = scaled(y.y, j, 4u * w + 2u);
        m[4u * w + 2u] = two.x;
        m[4u * w + 3u] = two.y;
    }
    return m;
}

void fetch_factors(Tile t, uint block) {
    if (own_scales == 0u) {
        next_factors[0] = packed_factor(push.operands.b_peaks.v[t.b_peak],
                                        push.operands.b_scales.v[t.b_scale + block * TILE]);
    } else {
        uint stride = TILE / mma_n * FACTOR_WORDS * subgroup;
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

void multiply_step() {
    [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
        MATRIX_A a[fragments_m];
        [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
            a[i] = matrix_a(i, depth);
        }
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            MATRIX_B b = matrix_b(j, depth);
            [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                sums[j * fragments_m + i] = coopMatMulAdd(a[i], b, sums[j * fragments_m + i]);
            }
        }
    }
}

void fetch_a(Tile t, uint step) {
    [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
        [[unroll]] for (uint u = 0u; u < UNITS_A; ++u) {
            a_next[i * UNITS_A + u] = a_memory.v[t.a + step * (A_BLOCK / 4u) + unit_a(i, u)];
        }
    }
}

// Loads run ahead of what is multiplied, those of A by a step and those of B by b_ahead, into the
// next block.
void multiply_block(Tile t, uint block, uint next) {
    if (!FACTORS_AHEAD) {
        fetch_factors(t, block);
    }
    [[unroll]] for (uint i = 0u; i < FACTORS; ++i) {
        factors[i] = next_factors[i];
    }
    if (FACTORS_AHEAD) {
        fetch_factors(t, next);
    }
    for (uint first = 0u; first < 4u; first += at_once) {
        [[unroll]] for (uint part = 0u; part < at_once; ++part) {
            [[unroll]] for (uint i = 0u; i < PARTS_A; ++i) {
                a_image[i] = a_next[i];
            }
            [[unroll]] for (uint i = 0u; i < PARTS_B; ++i) {
                b_image[i] = b_next[i];
            }
            [[unroll]] for (uint i = PARTS_B; i < b_ahead * PARTS_B; ++i) {
                b_next[i - PARTS_B] = b_next[i];
            }
            uint step = first + part, ahead = step + b_ahead;
            fetch_a(t, step < 3u ? block * 4u + step + 1u : next * 4u);
            fetch_b(t, b_ahead - 1u, ahead < 4u ? block * 4u + ahead : next * 4u + ahead - 4u);
            multiply_step();
        }
    }
}

// What the first block wants; there is one.
void fetch_first(Tile t, Place p) {
    uint first = min(p.warp_k, t.blocks - 1u);
    [[unroll]] for (uint s = 0u; s < b_ahead; ++s) {
        fetch_b(t, s, first * 4u + s);
    }
    fetch_a(t, first * 4u);
    fetch_factors(t, first);
}

// Two blocks at a time, because where a loop begins anew nothing overlaps; what the last steps load
// ahead is not needed.
void multiply(Tile t, Place p) {
    uint last = t.blocks - 1u, block = p.warp_k;
    if (at_once == 4u) {
        for (; block + warps_k < t.blocks; block += 2u * warps_k) {
            multiply_block(t, block, block + warps_k);
            multiply_block(t, block + warps_k, min(block + 2u * warps_k, last));
        }
    }
    for (; block < t.blocks; block += warps_k) {
        multiply_block(t, block, min(block + warps_k, last));
    }
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

// What D holds of row `row`, from `column` on, up to n.
vec4 load(uvec2 d, uint row, uint column) {
    uint at = row * push.ldd + column;
    return aligned != 0u ? load_d4(d, at) : load_d_part(d, at, min(push.n - column, 4u));
}

void store(uvec2 d, uint row, uint column, vec4 x, bool accumulate) {
    uint at = row * push.ldd + column;
    if (aligned != 0u) {
        store_d4(d, at, x, 1.0, accumulate);
    } else {
        store_d_part(d, at, x, min(push.n - column, 4u), 1.0, accumulate);
    }
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

// Where they go, and by what powers of two they are to be multiplied.
int to_row[LANE_STORES];
int of_row[LANE_STORES];
ivec4 of_column[COLUMNS];

// Matrices of row i, those that are stored together for the j-th time. Each subgroup passes them
// through its own part of `staged`; those of several subgroups along k are added up in turn.
void store_matrices(Place p, uint i, uint j) {
    uint warp = gl_SubgroupID % WARPS, lane = p.warp_k * subgroup + gl_SubgroupInvocationID;
    uint column = p.column0 + p.warp_n + lane % QUADS * 4u + j * together * mma_n;
    vec4 old[LANE_STORES]; // loaded before the stores that a load cannot pass
    [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
        if (push.accumulate != 0u && to_row[s] >= 0 && column < push.n) {
            old[s] = load(p.d, uint(to_row[s]), column);
        }
    }
    sharers_barrier();
    [[unroll]] for (uint e = 0u; e < together; ++e) {
        coopMatStore(sums[(j * together + e) * fragments_m + i], staged,
                     gl_SubgroupID * PART + e * (mma_n / 4u), PITCH,
                     gl_CooperativeMatrixLayoutRowMajor);
    }
    sharers_barrier();
    [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
        if (to_row[s] >= 0 && column < push.n) {
            uint at = (lane / QUADS + s * ROW_STEP) * PITCH + lane % QUADS;
            vec4 x = uintBitsToFloat(staged[warp * PART + at]);
            [[unroll]] for (uint k = 1u; k < warps_k; ++k) {
                x += uintBitsToFloat(staged[(k * WARPS + warp) * PART + at]);
            }
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                x[e] = raised(x[e], of_row[s] + of_column[j][e]);
            }
            if (push.accumulate != 0u) {
                x += old[s];
            }
            store(p.d, uint(to_row[s]), column, x, false);
        }
    }
}


void store_row(Tile t, Place p, uint i) {
    uint lane = p.warp_k * subgroup + gl_SubgroupInvocationID;
    uint first_row = (p.first_m + i * warps_m) * mma_m + lane / QUADS;
    [[unroll]] for (uint s = 0u; s < LANE_STORES; ++s) {
        to_row[s] = row_of_d(p, first_row + s * ROW_STEP);
        of_row[s] = exponent_of(push.operands.a_peaks.v[t.a_peak + first_row + s * ROW_STEP]);
    }
#define STORE_MATRICES(j)          \
    if (j < COLUMNS) {             \
        store_matrices(p, i, j);   \
    }
    UP_TO_8(STORE_MATRICES)
}

void store_sums(Tile t, Place p) {
    uint lane = p.warp_k * subgroup + gl_SubgroupInvocationID;
    [[unroll]] for (uint j = 0u; j < COLUMNS; ++j) {
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            uint column = p.warp_n + lane % QUADS * 4u + j * together * mma_n + e;
            of_column[j][e] = exponent_of(
                push.operands.b_peaks.v[t.b_peak + (own_scales != 0u ? column : 0u)]) - 14;
        }
    }
#define STORE_ROW(i)               \
    if (i < fragments_m) {         \
        store_row(t, p, i);        \
    }
    UP_TO_8(STORE_ROW)
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
        factors[f] = 0x3C003C00u; // ones: sums are scaled instead
    }
    for (uint ij = p.warp_k; ij < fragments_m * fragments_n; ij += warps_k) {
        uint i = ij % fragments_m, j = ij / fragments_m;
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
                store(p.d, uint(to), p.column0 + column, sum[q], push.accumulate != 0u);
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
        if (push.rows_from == ROWS_LIST) {
            g = push.operands.tiles.v[2u * m_tile];
            p.row0 = push.operands.tiles.v[2u * m_tile + 1u];
            p.row_end = push.operands.ends.v[g];
        } else {
            if (push.rows_from == ROWS_COUNTS) {
                p.row_end = min(push.m, push.operands.ends.v[g]);
                if (p.row0 >= p.row_end) {
                    return;
                }
            }
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
    t.factors = (b_block * (TILE / mma_n) + matrix_n) * FACTOR_WORDS * subgroup +
                gl_SubgroupInvocationID;
    t.a_peak = a_unit * TILE;
    t.b_peak = b_unit * TILE;
    a_memory = push.operands.a_image;
    b_memory = push.operands.b_image;

    p.row_end = min(p.row_end, p.row0 + TILE);
    const uint MATRICES = fragments_m * warps_m;
    uint m = 0u; // matrices of the tile that are done
    do {
        p.first_m = m + warp % warps_m;
        m += MATRICES;
        t.a = a_block * A_BLOCK + p.first_m * UNITS_A * subgroup + gl_SubgroupInvocationID;
        if (FIRST_EARLY && t.blocks != 0u) {
            fetch_first(t, p);
        }
        uint wide_a = wide_parts(a_unit, p.row_end - p.row0);
        if (t.blocks == 0u || wide_a != 0u || push.operands.b_spread.v[b_unit] > SPREAD) {
            store_slowly(t, p, wide_a);
            continue;
        }
        if (!FIRST_EARLY) {
            fetch_first(t, p);
        }
        [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
            sums[i] = ACCUMULATOR(0.0);
        }
        multiply(t, p);
        store_sums(t, p);
    } while (m * mma_m < p.row_end - p.row0);
}
