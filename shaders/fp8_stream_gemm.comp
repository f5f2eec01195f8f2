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

const uint SPREAD = 22u; // powers of two that f16 holds below the first code's
const uint INFINITY_BITS = 0x7F800000u;

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
shared uint peaks[BLOCK_M];
shared uint slow_rows[(BLOCK_M + 31u) / 32u];
shared uint nan_columns[(BLOCK_N + 31u) / 32u];

struct Tile {
    uvec2 a;        // addresses, of the batch entry or group
    uvec2 b;
    uvec2 a_scales;
    uvec2 b_scales;
    uvec2 d;
    uint row0;
    uint rows;      // of the tile, that exist
    uint column0;
};

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
uint a_row(Tile t, uint row) {
    uint r = t.row0 + min(row, t.rows - 1u);
    return a_by_slot != 0u ? uint(max(push.operands.slots.v[r], 0)) / push.slots_per_a_row : r;
}
uint warp_column() {
    return gl_SubgroupID * WARP_N;
}

// row: as a_row says
uint scale_of_a(Tile t, uint row, uint block) {
    return ReadUint(t.a_scales).v[(row >> push.a_shift) * push.a_scale_ld + block];
}
uint scale_of_b(Tile t, uint block) {
    return ReadUint(t.b_scales).v[t.column0 / 128u * push.b_scale_ld + block];
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

// Four codes as f16 times 2^-8: the first and third, then the second and fourth.
uvec2 halves(uint codes) {
    return uvec2((codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u),
                 (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u));
}

// Bits 7, 15, 23 and 31 say which codes are NaN.
uint nan_bits(uint codes) {
    return (codes & 0x7F7F7F7Fu) + 0x01010101u;
}
uint nan_bits(uvec4 codes) {
    return nan_bits(codes.x) | nan_bits(codes.y) | nan_bits(codes.z) | nan_bits(codes.w);
}

uint times(uint pair, uint factor) {
    return packFloat2x16(unpackFloat2x16(pair) * unpackFloat2x16(factor));
}

// Sixteen codes from k = 16 * at, those from push.k on as 0.
uvec4 present(uvec4 codes, uint at) {
    if (16u * at + 16u > push.k) {
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            uint first = 16u * at + 4u * e;
            uint count = push.k > first ? min(push.k - first, 4u) : 0u;
            codes[e] &= count == 4u ? 0xFFFFFFFFu : (1u << 8u * count) - 1u;
        }
    }
    return codes;
}

bool is_nan(uint scale) {
    return scale > INFINITY_BITS;
}
// Of the product of two scales, from 0 to 508.
uint exponent_of(uint scale_a, uint scale_b) {
    return (scale_a >> 23) + (scale_b >> 23);
}

void stage(Tile t, uint set, uint step) {
    [[unroll]] for (uint i = 0u; i < A_CHUNKS; ++i) {
        uint chunk = a_chunk(i);
        uint row = chunk / ROW_CHUNKS, part = chunk % ROW_CHUNKS;
        if (A_CHUNKS * local_size == BLOCK_M * ROW_CHUNKS || row < BLOCK_M) {
            uvec4 codes = present(a_next[set][i], step * ROW_CHUNKS + part);
            uint below = peaks[row] - exponent_of(a_scale[set][i], b_scale[set]);
            bool nan = is_nan(a_scale[set][i]) || is_nan(b_scale[set]) ||
                       (nan_bits(codes) & 0x80808080u) != 0u;
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
        b_nan[i] |= nan_bits(codes);
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

// peaks[row]: the largest exponent_of over the blocks.
void find_peaks(Tile t) {
    uint lane = gl_LocalInvocationIndex;
    if (lane < BLOCK_M) {
        peaks[lane] = 0u;
    }
    if (lane < (BLOCK_M + 31u) / 32u) {
        slow_rows[lane] = 0u;
    }
    if (lane < (BLOCK_N + 31u) / 32u) {
        nan_columns[lane] = 0u;
    }
    barrier();
    uint blocks = (push.k + 127u) / 128u;
    uint item = lane;
    do {
        uint of_a[8], of_b[8];
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            uint block = min((item + i * local_size) / BLOCK_M, blocks - 1u);
            of_a[i] = scale_of_a(t, a_row(t, (item + i * local_size) % BLOCK_M), block);
            of_b[i] = scale_of_b(t, block);
        }
        [[unroll]] for (uint i = 0u; i < 8u; ++i) {
            if (!is_nan(of_a[i]) && !is_nan(of_b[i])) {
                atomicMax(peaks[(item + i * local_size) % BLOCK_M], exponent_of(of_a[i], of_b[i]));
            }
        }
        item += 8u * local_size;
    } while (item < BLOCK_M * blocks);
    barrier();
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

// value * 2^exponent, where no step of it leaves the range unless the result does.
float raised(float value, int exponent) {
    int some = exponent >> 1;
    precise float x = value * uintBitsToFloat(uint(127 + some) << 23);
    x = x * uintBitsToFloat(uint(127 + exponent - some) << 23);
    return x;
}

void store(Tile t, uint row, uint column, vec4 x) {
    uint to = t.row0 + row;
    if (d_by_slot != 0u) {
        to = uint(push.operands.slots.v[to]);
        if (int(to) < 0) {
            return;
        }
    }
    uint at = to * push.ldd + t.column0 + column;
    if (aligned != 0u) {
        store_d4(t.d, at, x, 1.0, push.accumulate != 0u);
    } else {
        store_d_part(t.d, at, x, min(push.n - t.column0 - column, 4u), 1.0, push.accumulate != 0u);
    }
}

void subgroup_shared_barrier() {
    controlBarrier(gl_ScopeSubgroup, gl_ScopeSubgroup, gl_StorageSemanticsShared,
                   gl_SemanticsAcquireRelease);
}

bool is_slow(uint row) {
    return (slow_rows[row / 32u] >> row % 32u & 1u) != 0u;
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
            if (row < t.rows && t.column0 + column < push.n && !is_slow(row)) {
                vec4 x = uintBitsToFloat(a_stage[part + quad]);
                uint nan = nan_columns[column / 32u] >> column % 32u;
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    x[e] = raised(x[e], int(peaks[row]) - 253);
                    if ((nan >> e & 1u) != 0u) {
                        x[e] = uintBitsToFloat(FP8_NAN);
                    }
                }
                store(t, row, column, x);
            }
        }
    }
}

// One element of a slow row.
float slow_sum(Tile t, uint row, uint column) {
    float sum = 0.0;
    uint last = (push.k - 1u) / 16u, at = 0u;
    row = a_row(t, row);
    do {
        // In bounds even where a loop's body is run with an empty mask: common.glsl.
        uint to = min(at, last);
        uvec4 a = present(ReadUvec4(t.a).v[row * push.lda16 + to], at);
        uvec4 b = present(ReadUvec4(t.b).v[(t.column0 + column) * push.ldb16 + to], at);
        float of_a = uintBitsToFloat(scale_of_a(t, row, to / 8u));
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
    for (uint row = 0u; row < BLOCK_M; ++row) { // only rows that exist are slow
        if (is_slow(row)) {
            for (uint quad = gl_LocalInvocationIndex; quad < BLOCK_N / 4u; quad += local_size) {
                vec4 x = vec4(0);
                for (uint e = 0u; e < 4u && t.column0 + 4u * quad + e < push.n; ++e) {
                    x[e] = slow_sum(t, row, 4u * quad + e);
                }
                if (t.column0 + 4u * quad < push.n) {
                    store(t, row, 4u * quad, x);
                }
            }
        }
    }
}

void main() {
    Tile t;
    t.column0 = gl_WorkGroupID.y * unit;
    if (t.column0 % BLOCK_N != 0u || t.column0 >= push.n) {
        return;
    }
    uint g = gl_WorkGroupID.z, row0 = gl_WorkGroupID.x * BLOCK_M, end = min(row0 + BLOCK_M, push.m);
    t.a = uvec2(push.operands.a_codes);
    t.a_scales = uvec2(push.operands.a_scales);
    t.d = uvec2(push.operands.d);
    if (push.from_list != 0u) {
        g = push.operands.tiles.v[2u * gl_WorkGroupID.x];
        row0 = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u];
        end = min(row0 + push.tile_rows, push.operands.ends.v[g]);
    } else {
        t.a = address_add(t.a, g, push.a_batch16, 4u);
        t.a_scales = address_add(t.a_scales, g, push.a_scale_batch, 2u);
        t.d = address_add(t.d, g, push.stride_d, D_LOG2_BYTES);
    }
    t.b = address_add(uvec2(push.operands.b_codes), g, push.b_batch16, 4u);
    t.b_scales = address_add(uvec2(push.operands.b_scales), g, push.b_scale_batch, 2u);
    if (row0 >= end) {
        return;
    }
    t.row0 = row0;
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
