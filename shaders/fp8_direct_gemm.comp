// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of E4M3 codes with power-of-two scales, for few rows of A, as
// fp8_stream_gemm.comp with its operands and numbers; here the codes of both operands go from memory
// to the registers of matrices, sixteen at a time, without workgroup memory between.
//
// That needs to know which elements of a matrix an invocation holds: in every slot, per_k elements
// of one row of A (column of B), of the same k in all slots and both operands. Which k these are
// does not matter, as k may be counted in any order. The sixteen codes that an invocation loads
// of a row serve 16 / per_k matrices one after another. (matrix_images.hpp says how the host knows.)
//
// Constants  local_size   subgroup size * warps_n * warps_k
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            fragments_m  BLOCK_M = mma_m * fragments_m
//            fragments_n, warps_n   BLOCK_N = mma_n * fragments_n * warps_n, which divides 128
//            warps_k      subgroups that share the steps of k of a tile among them
//            per_k        elements of a slot
//            order_a, order_b   four bits for each element: slot * per_k + place in the slot
//            k_stride     the smallest k of a slot is a multiple of it, and says which k it has
//            segments     of SEGMENT k per step, which divides 128
//            ahead        steps by which loads run ahead
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
// Dispatch   x = tiles of rows (indirect with from_list), y = ceil(n / unit), z = batch
//            Shared: 4 * mma_m * mma_n * warps_n * warps_k + 8 * BLOCK_M bytes and a few words.
// Order      blocks of 128 k go round to the warps_k subgroups, whose sums are added in their order;
//            inside a block k goes as per_k says, inside a matrix it is the device's. An element's bits
//            depend on its row of A, its column of B and warps_k alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"
#include "include/fp8.glsl"

#include "fp8_direct_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

#define WARPS (warps_n * warps_k)
#define LANES (local_size / WARPS)
#define BLOCK_M (mma_m * fragments_m)
#define WARP_N (mma_n * fragments_n)
#define BLOCK_N (WARP_N * warps_n)
#define ELEMENTS_A (mma_m * mma_k / LANES)
#define ELEMENTS_B (mma_k * mma_n / LANES)
#define SLOTS_A (ELEMENTS_A / per_k)
#define SLOTS_B (ELEMENTS_B / per_k)
#define CHUNKS (mma_k / per_k)      // of sixteen codes of a row side by side in a segment
#define SEGMENT (16u * CHUNKS)
#define STEP_K (SEGMENT * segments)
#define LOADS_A (fragments_m * SLOTS_A)
#define LOADS_B (fragments_n * SLOTS_B)
#define PART (mma_m * mma_n / 4u)
#define IMAGE ((mma_m > mma_n ? mma_m : mma_n) * mma_k / 8u)
shared uvec4 parts[PART * WARPS > IMAGE ? PART * WARPS : IMAGE];

#include "include/fp8_stream.glsl"

uint warp_n = gl_SubgroupID % warps_n, warp_k = gl_SubgroupID / warps_n;

// What this invocation holds of matrices.
uint a_slot[SLOTS_A]; // rows
uint b_slot[SLOTS_B]; // columns
uint my_chunk;        // of a segment

uint place_a(uint e) {
    return order_a >> 4u * e & 15u;
}
uint place_b(uint e) {
    return order_b >> 4u * e & 15u;
}

#define A_MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define B_MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>
ACCUMULATOR sums[fragments_m * fragments_n];

// Matrices of the numbers of their own elements tell.
void find_slots() {
    for (uint i = gl_LocalInvocationIndex; i < IMAGE; i += local_size) {
        [[unroll]] for (uint q = 0u; q < 4u; ++q) {
            parts[i][q] = packFloat2x16(f16vec2(float16_t(8u * i + 2u * q),
                                                float16_t(8u * i + 2u * q + 1u)));
        }
    }
    barrier();
    A_MATRIX a;
    B_MATRIX b;
    coopMatLoad(a, parts, 0u, mma_k / 8u, gl_CooperativeMatrixLayoutRowMajor);
    coopMatLoad(b, parts, 0u, mma_k / 8u, gl_CooperativeMatrixLayoutColumnMajor);
    [[unroll]] for (uint e = 0u; e < ELEMENTS_A; ++e) {
        if (place_a(e) % per_k == 0u) {
            a_slot[place_a(e) / per_k] = uint(a[e]) / mma_k;
        }
    }
    [[unroll]] for (uint e = 0u; e < ELEMENTS_B; ++e) {
        if (place_b(e) % per_k == 0u) {
            b_slot[place_b(e) / per_k] = uint(b[e]) / mma_k;
        }
        if (place_b(e) == 0u) {
            my_chunk = uint(b[e]) % mma_k / k_stride;
        }
    }
}

uvec4 a_next[ahead][LOADS_A * segments];
uvec4 b_next[ahead][LOADS_B * segments];
uint a_scale[ahead][LOADS_A];
uint b_scale[ahead];
uint a_rows[LOADS_A]; // where rows stand
uint a_peaks[LOADS_A];
uint b_nan[LOADS_B];

uint row_of(uint i) {
    return i / SLOTS_A * mma_m + a_slot[i % SLOTS_A];
}
uint column_of(uint i) {
    return warp_n * WARP_N + i / SLOTS_B * mma_n + b_slot[i % SLOTS_B];
}

void fetch(uint set, Tile t, uint step) {
    uint last = (push.k - 1u) / 16u;
    [[unroll]] for (uint i = 0u; i < LOADS_B; ++i) {
        uint column = min(t.column0 + column_of(i), push.n - 1u);
        [[unroll]] for (uint s = 0u; s < segments; ++s) {
            uint at = min((step * segments + s) * CHUNKS + my_chunk, last);
            b_next[set][i * segments + s] = ReadUvec4(t.b).v[column * push.ldb16 + at];
        }
    }
    uint block = min(step * STEP_K, push.k - 1u) / 128u;
    [[unroll]] for (uint i = 0u; i < LOADS_A; ++i) {
        bool there = row_of(i) < t.rows; // others are left out
        [[unroll]] for (uint s = 0u; s < segments; ++s) {
            uint at = (step * segments + s) * CHUNKS + my_chunk;
            uvec4 codes = uvec4(0u);
            if (there && at <= last) {
                codes = ReadUvec4(t.a).v[a_rows[i] * push.lda16 + at];
            }
            a_next[set][i * segments + s] = codes;
        }
        a_scale[set][i] = scale_of_a(t, a_rows[i], block);
    }
    b_scale[set] = scale_of_b(t, block);
}

// Of a step, for a row of A: 2^(15 - distance to its peak) twice as f16, or NaN.
uint factor_of(Tile t, uint set, uint i) {
    uint row = row_of(i);
    uint below = a_peaks[i] - exponent_of(a_scale[set][i], b_scale[set]);
    bool nan = is_nan(a_scale[set][i]) || is_nan(b_scale[set]);
    if (!nan && below > SPREAD && row < t.rows) {
        atomicOr(slow_rows[row / 32u], 1u << row % 32u);
    }
    [[unroll]] for (uint s = 0u; s < segments; ++s) {
        nan = nan || (fp8_e4m3_nan_bits(a_next[set][i * segments + s]) & 0x80808080u) != 0u;
    }
    uint factor = nan ? 0x7E00u : 30u - min(below, 29u) << 10;
    return factor | factor << 16;
}

// Code i of sixteen, which stand in another order for both operands alike, as f16 times 2^-8.
float16_t code_at(uvec4 codes, uint i) {
    uvec2 pairs = halves(codes[i / 4u]);
    return unpackFloat2x16(i % 4u < 2u ? pairs.x : pairs.y)[i % 2u];
}
float16_t scaled_code_at(uvec4 codes, uint i, uint factor) {
    uvec2 pairs = halves(codes[i / 4u]);
    return (unpackFloat2x16(i % 4u < 2u ? pairs.x : pairs.y) * unpackFloat2x16(factor))[i % 2u];
}

void multiply(Tile t, uint set, uint step) {
    bool tail = push.k % 16u != 0u && (step + 1u) * STEP_K > push.k;
    if (tail) {
        [[unroll]] for (uint s = 0u; s < segments; ++s) {
            uint at = (step * segments + s) * CHUNKS + my_chunk;
            [[unroll]] for (uint i = 0u; i < LOADS_A; ++i) {
                a_next[set][i * segments + s] = present(a_next[set][i * segments + s], at);
            }
            [[unroll]] for (uint i = 0u; i < LOADS_B; ++i) {
                b_next[set][i * segments + s] = present(b_next[set][i * segments + s],
                                                        min(at, (push.k - 1u) / 16u));
            }
        }
    }
    uint factors[LOADS_A];
    [[unroll]] for (uint i = 0u; i < LOADS_A; ++i) {
        factors[i] = factor_of(t, set, i);
    }
    [[unroll]] for (uint i = 0u; i < LOADS_B * segments; ++i) {
        b_nan[i / segments] |= fp8_e4m3_nan_bits(b_next[set][i]);
    }
    [[unroll]] for (uint s = 0u; s < segments; ++s) {
        [[unroll]] for (uint part = 0u; part < 16u / per_k; ++part) {
            A_MATRIX a[fragments_m];
            [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
                [[unroll]] for (uint e = 0u; e < ELEMENTS_A; ++e) {
                    uint i = m * SLOTS_A + place_a(e) / per_k;
                    a[m][e] = scaled_code_at(a_next[set][i * segments + s],
                                             part * per_k + place_a(e) % per_k, factors[i]);
                }
            }
            [[unroll]] for (uint n = 0u; n < fragments_n; ++n) {
                B_MATRIX b;
                [[unroll]] for (uint e = 0u; e < ELEMENTS_B; ++e) {
                    uint i = n * SLOTS_B + place_b(e) / per_k;
                    b[e] = code_at(b_next[set][i * segments + s],
                                   part * per_k + place_b(e) % per_k);
                }
                [[unroll]] for (uint m = 0u; m < fragments_m; ++m) {
                    uint at = n * fragments_m + m;
                    sums[at] = coopMatMulAdd(a[m], b, sums[at]);
                }
            }
        }
    }
}

// The i-th of this subgroup.
uint step_at(uint i) {
    const uint at_once = 128u / STEP_K;
    return (warp_k + i / at_once * warps_k) * at_once + i % at_once;
}

void sum_up(Tile t) {
    uint steps = (push.k + STEP_K - 1u) / STEP_K;
    [[unroll]] for (uint i = 0u; i < LOADS_A; ++i) {
        a_rows[i] = a_row(t, row_of(i));
    }
    [[unroll]] for (uint set = 0u; set < ahead; ++set) {
        fetch(set, t, step_at(set));
    }
    find_peaks(t);
    [[unroll]] for (uint i = 0u; i < LOADS_A; ++i) {
        a_peaks[i] = peaks[row_of(i)];
    }
    uint i = 0u;
    do {
        [[unroll]] for (uint set = 0u; set < ahead; ++set) {
            if (step_at(i + set) < steps) {
                multiply(t, set, step_at(i + set));
                fetch(set, t, step_at(i + set + ahead));
            }
        }
        i += ahead;
    } while (step_at(i) < steps);
    [[unroll]] for (uint i = 0u; i < LOADS_B; ++i) {
        if ((b_nan[i] & 0x80808080u) != 0u) {
            atomicOr(nan_columns[column_of(i) / 32u], 1u << column_of(i) % 32u);
        }
    }
}

// All subgroups pass one matrix each; those of a column are added in their order.
void store_sums(Tile t) {
    [[unroll]] for (uint s = 0u; s < fragments_m * fragments_n; ++s) {
        coopMatStore(sums[s], parts, gl_SubgroupID * PART, mma_n / 4u,
                     gl_CooperativeMatrixLayoutRowMajor);
        barrier();
        for (uint i = gl_LocalInvocationIndex; i < PART * warps_n; i += local_size) {
            uint quad = i % PART;
            uint row = s % fragments_m * mma_m + quad / (mma_n / 4u);
            uint column =
                i / PART * WARP_N + s / fragments_m * mma_n + quad % (mma_n / 4u) * 4u;
            vec4 x = uintBitsToFloat(parts[i]);
            [[unroll]] for (uint w = 1u; w < warps_k; ++w) {
                x += uintBitsToFloat(parts[w * warps_n * PART + i]);
            }
            store_sum(t, row, column, x);
        }
        barrier();
    }
}

void main() {
    Tile t = tile_of_workgroup();
    if (t.rows == 0u) {
        return;
    }
    find_slots();
    uint end = t.row0 + t.rows;
    do { // a test at the loop's head would read once more than it should: common.glsl
        t.rows = min(end - t.row0, BLOCK_M);
        [[unroll]] for (uint i = 0u; i < LOADS_B; ++i) {
            b_nan[i] = 0u;
        }
        [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
            sums[i] = ACCUMULATOR(0.0);
        }
        barrier();
        sum_up(t);
        barrier();
        store_sums(t);
        store_slow_rows(t);
        barrier();
        t.row0 += BLOCK_M;
    } while (t.row0 < end);
}
