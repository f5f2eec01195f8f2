// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of E4M3 codes with power-of-two scales, for few rows of A: the codes of
// B are read from memory once, as they stand there, and become f16 in registers, on matrix units
// that take f16. BLOCK_M x BLOCK_N elements of D per workgroup.
//
// a_codes [rows, k], a_scales: f32 bits, one per 128 k of each row (a_shift 0) or 128 rows (7)
// b_codes [groups or batch, n, k], b_scales one per 128 x 128
// d       [rows, n]; all row-major with the strides of `push`: codes' in sixteens
// a_by_slot, d_by_slot  row r of a group stands in row slots[r] / slots_per_a_row of A, and slots[r]
//            of D (nowhere if that is -1)
// from_list  the group of tile t is tiles[2t], its rows go from tiles[2t + 1] to ends[group], at most
//            tile_rows of them; otherwise z is the batch, x counts tiles of BLOCK_M rows of m
//
// Two neighbouring codes of B pass workgroup memory as one f16 and so come into a matrix, whose
// elements are then taken apart into the matrix of even k and that of odd k, wherever the device
// keeps them. Moved to the bits of an f16, a code is its value times 2^-8, exactly. Scales of both
// operands go into A: its codes are scaled by a power of two that says how far the product of a
// block's scales lies below the row's largest; what that makes of a sum is applied once, at the end.
// A row in which that distance exceeds what f16 holds (2^22) is computed by f32 arithmetic instead.
//
// Constants  local_size   subgroup size * warps
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            fragments_m  BLOCK_M = mma_m * fragments_m
//            fragments_n, warps   BLOCK_N = mma_n * fragments_n * warps, which divides 128
//            step_k       k per step: 32, 64 or 128
//            ahead        steps by which loads run ahead
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            unit         columns that one step of y stands for; workgroups between tiles do nothing
// Dispatch   x = tiles of rows (indirect with from_list), y = ceil(n / unit), z = batch
//            Shared: 16 * (BLOCK_M * (step_k / 8 + 1) + BLOCK_N * (step_k / 16 + 1)) and 4 * BLOCK_M
//            bytes and a few words.
// Order      ascending k in steps of 2 * mma_k, even k before odd; inside it is the device's. An
//            element's bits depend on its row of A and its column of B alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"
#include "include/fp8.glsl"

#include "fp8_stream_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

#define LANES (local_size / warps)
#define BLOCK_M (mma_m * fragments_m)
#define WARP_N (mma_n * fragments_n)
#define BLOCK_N (WARP_N * warps)
#define ROW_CHUNKS (step_k / 16u)
// Units of 16 bytes from one staged row to the next: A as f16, B as codes, and padding.
#define A_ROW (2u * ROW_CHUNKS + 1u)
#define B_ROW (ROW_CHUNKS + 1u)
#define PART (mma_m * mma_n / 4u)
#define PARTS (warps * PART)
shared uvec4 a_stage[PARTS > BLOCK_M * A_ROW ? PARTS : BLOCK_M * A_ROW];
shared uvec4 b_stage[BLOCK_N * B_ROW];

#include "include/fp8_stream.glsl"

// Chunks of 16 codes of a step that an invocation carries.
#define A_CHUNKS ((BLOCK_M * ROW_CHUNKS + local_size - 1u) / local_size)
#define B_CHUNKS (WARP_N * ROW_CHUNKS / LANES)
uvec4 a_next[ahead][A_CHUNKS];
uvec4 b_next[ahead][B_CHUNKS];
uint a_scale[ahead][A_CHUNKS];
uint b_scale[ahead];
uint b_nan[B_CHUNKS];
uint a_rows[A_CHUNKS]; // where the chunks' rows stand

uint a_chunk(uint i) {
    return i * local_size + gl_LocalInvocationIndex;
}
uint b_chunk(uint i) {
    return i * LANES + gl_SubgroupInvocationID;
}
uint warp_column() {
    return gl_SubgroupID * WARP_N;
}

void fetch(uint set, Tile t, uint step) {
    uint last = (push.k - 1u) / 16u;
    [[unroll]] for (uint i = 0u; i < B_CHUNKS; ++i) {
        uint chunk = b_chunk(i);
        uint column = min(t.column0 + warp_column() + chunk / ROW_CHUNKS, push.n - 1u);
        uint at = min(step * ROW_CHUNKS + chunk % ROW_CHUNKS, last);
        b_next[set][i] = ReadUvec4(t.b).v[column * push.ldb16 + at];
    }
    uint block = min(step * step_k, push.k - 1u) / 128u;
    [[unroll]] for (uint i = 0u; i < A_CHUNKS; ++i) {
        uint at = min(step * ROW_CHUNKS + a_chunk(i) % ROW_CHUNKS, last);
        a_next[set][i] = ReadUvec4(t.a).v[a_rows[i] * push.lda16 + at];
        a_scale[set][i] = scale_of_a(t, a_rows[i], block);
    }
    b_scale[set] = scale_of_b(t, block);
}

void stage(Tile t, uint set, uint step) {
    [[unroll]] for (uint i = 0u; i < A_CHUNKS; ++i) {
        uint chunk = a_chunk(i);
        uint row = chunk / ROW_CHUNKS, part = chunk % ROW_CHUNKS;
        if (A_CHUNKS * local_size == BLOCK_M * ROW_CHUNKS || row < BLOCK_M) {
            uvec4 codes = present(a_next[set][i], step * ROW_CHUNKS + part);
            uint below = peaks[row] - exponent_of(a_scale[set][i], b_scale[set]);
            bool nan = is_nan(a_scale[set][i]) || is_nan(b_scale[set]) ||
                       (fp8_e4m3_nan_bits(codes) & 0x80808080u) != 0u;
            if (!nan && below > SPREAD && row < t.rows) {
                atomicOr(slow_rows[row / 32u], 1u << row % 32u);
            }
            uint factor = nan ? 0x7E00u : 30u - min(below, 29u) << 10;
            factor |= factor << 16;
            uvec4 even, odd;
            [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                uvec2 pairs = halves(codes[e]);
                even[e] = times(pairs.x, factor);
                odd[e] = times(pairs.y, factor);
            }
            uint to = row * A_ROW + part / 2u * 4u + part % 2u;
            a_stage[to] = even;
            a_stage[to + 2u] = odd;
        }
    }
    bool tail = push.k % 16u != 0u && (step + 1u) * step_k > push.k;
    [[unroll]] for (uint i = 0u; i < B_CHUNKS; ++i) {
        uint chunk = b_chunk(i);
        uvec4 codes = b_next[set][i];
        if (tail) {
            codes = present(codes, step * ROW_CHUNKS + chunk % ROW_CHUNKS);
        }
        b_nan[i] |= fp8_e4m3_nan_bits(codes);
        b_stage[(warp_column() + chunk / ROW_CHUNKS) * B_ROW + chunk % ROW_CHUNKS] = codes;
    }
}

#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>
#define A_MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define B_MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
ACCUMULATOR sums[fragments_m * fragments_n];

void multiply() {
    [[unroll]] for (uint k = 0u; k < step_k / 2u; k += mma_k) {
        uint segment = k / 16u, inside = k % 16u / 8u;
        A_MATRIX a_even[fragments_m], a_odd[fragments_m];
        [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
            uint at = i * mma_m * A_ROW + 4u * segment + inside;
            coopMatLoad(a_even[i], a_stage, at, A_ROW, gl_CooperativeMatrixLayoutRowMajor);
            coopMatLoad(a_odd[i], a_stage, at + 2u, A_ROW, gl_CooperativeMatrixLayoutRowMajor);
        }
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            B_MATRIX codes, even, odd;
            coopMatLoad(codes, b_stage,
                        (warp_column() + j * mma_n) * B_ROW + 2u * segment + inside, B_ROW,
                        gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint e = 0u; e < mma_k * mma_n / LANES; e += 2u) {
                uvec2 pairs = halves(packFloat2x16(f16vec2(codes[e], codes[e + 1u])));
                f16vec2 x = unpackFloat2x16(pairs.x), y = unpackFloat2x16(pairs.y);
                even[e] = x.x;
                even[e + 1u] = x.y;
                odd[e] = y.x;
                odd[e + 1u] = y.y;
            }
            [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                uint s = j * fragments_m + i;
                sums[s] = coopMatMulAdd(a_even[i], even, sums[s]);
                sums[s] = coopMatMulAdd(a_odd[i], odd, sums[s]);
            }
        }
    }
}

void sum_up(Tile t) {
    uint steps = (push.k + step_k - 1u) / step_k;
    [[unroll]] for (uint i = 0u; i < A_CHUNKS; ++i) {
        a_rows[i] = a_row(t, min(a_chunk(i) / ROW_CHUNKS, BLOCK_M - 1u));
    }
    [[unroll]] for (uint set = 0u; set < ahead; ++set) {
        fetch(set, t, set);
    }
    find_peaks(t);
    uint step = 0u;
    do {
        // What is staged behind the last step has zeros for A.
        [[unroll]] for (uint set = 0u; set < ahead; ++set) {
            stage(t, set, step + set);
            barrier();
            if (step + set + ahead < steps) {
                fetch(set, t, step + set + ahead);
            }
            multiply();
            barrier();
        }
        step += ahead;
    } while (step < steps);
    [[unroll]] for (uint i = 0u; i < B_CHUNKS; ++i) {
        if ((b_nan[i] & 0x80808080u) != 0u) {
            uint column = warp_column() + b_chunk(i) / ROW_CHUNKS;
            atomicOr(nan_columns[column / 32u], 1u << column % 32u);
        }
    }
}

void subgroup_shared_barrier() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
                   gl_SemanticsAcquireRelease);
}

// Each subgroup passes its matrices one by one through its own part of a_stage.
void store_sums(Tile t) {
    uint part = gl_SubgroupID * PART;
    [[unroll]] for (uint s = 0u; s < fragments_m * fragments_n; ++s) {
        subgroup_shared_barrier();
        coopMatStore(sums[s], a_stage, part, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_shared_barrier();
        uint m = s % fragments_m * mma_m, n = warp_column() + s / fragments_m * mma_n;
        for (uint quad = gl_SubgroupInvocationID; quad < PART; quad += LANES) {
            uint row = m + quad / (mma_n / 4u);
            uint column = n + quad % (mma_n / 4u) * 4u;
            store_sum(t, row, column, uintBitsToFloat(a_stage[part + quad]));
        }
    }
}

void main() {
    Tile t = tile_of_workgroup();
    if (t.rows == 0u) {
        return;
    }
    uint end = t.row0 + t.rows;
    do { // a test at the loop's head would read once more than it should: common.glsl
        t.rows = min(end - t.row0, BLOCK_M);
        [[unroll]] for (uint i = 0u; i < B_CHUNKS; ++i) {
            b_nan[i] = 0u;
        }
        [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
            sums[i] = ACCUMULATOR(0.0);
        }
        sum_up(t);
        barrier();
        store_sums(t);
        store_slow_rows(t);
        barrier();
        t.row0 += BLOCK_M;
    } while (t.row0 < end);
}
