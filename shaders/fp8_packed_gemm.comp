// SPDX-License-Identifier: MIT
// D = A * transpose(B) (+ D) of packed E4M3 operands (include/fp8_packed.glsl) on matrix units that
// take f16. 128 x 128 elements of D per workgroup.
//
// An E4M3 code moved to the bits of an f16 is its value times 2^-8, exactly. Codes are then scaled by
// a power of two that says how far their block's scale lies below the peak of their x; what the peaks
// make of a sum is applied once, at the end. Where scales of a tile differ by more than f16 can hold
// (2^22) the workgroup takes a slow loop of f32 arithmetic instead.
//
// rows    (by_sum 0) tile t of A times the tiles of B of its group, over all blocks. from_list: the
//         group is tiles[2t], its rows of D go from tiles[2t + 1] to ends[group]; otherwise t counts
//         the tiles of a batch of m rows each.
// sums    (by_sum 1) D[g] = sum over the blocks of group g, which begin at begins[g] / 128 + g and
//         hold rows up to ends[g]; an empty group leaves D[g] when accumulating and clears it else.
// Constants  local_size   subgroup size * warps_m * warps_n; 128
//            mma_*        a row that the device enumerates: f16, f32 sums, subgroup scope
//            fragments_*, warps_*   mma * fragments * warps = 128 along m and n
//            scaled_b     1: every column of B has its own scales; 0: a block of B has one
//            aligned      1: d and its rows begin at multiples of four elements, n is a multiple of 4
//            band         rows of tiles that run together
// Dispatch   x = tiles of A (indirect with from_list), of one batch entry or group without; y =
//            ceil(n / 128); z = batch or groups. Shared 20 KiB: two workgroups share a processor
//            that has 48.
// Order      k in steps of mma_k, inside which it is the device's. An element's bits depend on its row
//            of A and its column of B alone.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#define A_BF16 0
#define B_BF16 0
#include "include/gemm_operands.glsl"
#include "include/fp8.glsl"
#include "include/fp8_packed.glsl"

#include "fp8_packed_gemm.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint TILE = 128u;
const uint ROW = 5u;             // units of 16 bytes from one staged x to the next: 32 k and padding
const uint CHUNKS = 2u;          // of a step, per invocation and operand
const uint SPREAD = 22u;         // powers of two that f16 holds below the first code's
const uint INFINITY_BITS = 0x7F800000u;

#define PART (mma_m * mma_n / 4u)
#define PARTS (warps_m * warps_n * PART)
shared uvec4 a_stage[PARTS > TILE * ROW ? PARTS : TILE * ROW];
shared uvec4 b_stage[TILE * ROW];

struct Tile {
    uint a;       // first chunk of A's and B's codes, first of their scales, first of their peaks
    uint b;
    uint a_scale;
    uint b_scale;
    uint a_peak;
    uint b_peak;
    uint blocks;  // of 128 k
};

uvec4 a_next[2][CHUNKS];
uvec4 b_next[2][CHUNKS];

void fetch(uint set, Tile t, uint step) {
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        uint chunk = step * PACKED_STEP + i * 128u + gl_LocalInvocationIndex;
        a_next[set][i] = push.operands.a_codes.v[t.a + chunk];
        b_next[set][i] = push.operands.b_codes.v[t.b + chunk];
    }
}

// Four codes as f16 times 2^-8, the first and third, then the second and fourth: both operands in
// the same order of k.
uvec2 halves(uint codes) {
    return uvec2((codes << 8 & 0x80008000u) | (codes << 7 & 0x3F803F80u),
                 (codes & 0x80008000u) | (codes >> 1 & 0x3F803F80u));
}

uint times(uint pair, uint factor) {
    return packFloat2x16(unpackFloat2x16(pair) * unpackFloat2x16(factor));
}

uvec4 staged(uint low, uint high, uint factor, bool scaled) {
    uvec4 x = uvec4(halves(low), halves(high));
    return scaled ? uvec4(times(x.x, factor), times(x.y, factor), times(x.z, factor),
                          times(x.w, factor))
                  : x;
}

uint a_factor[CHUNKS];
uint b_factor[CHUNKS];

void stage(uint set) {
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        uint chunk = i * 128u + gl_LocalInvocationIndex;
        uint to = packed_x(chunk) * ROW + chunk % 2u * 2u;
        uvec4 x = a_next[set][i];
        a_stage[to] = staged(x.x, x.y, a_factor[i], true);
        a_stage[to + 1u] = staged(x.z, x.w, a_factor[i], true);
        x = b_next[set][i];
        b_stage[to] = staged(x.x, x.y, b_factor[i], scaled_b != 0u);
        b_stage[to + 1u] = staged(x.z, x.w, b_factor[i], scaled_b != 0u);
    }
}

// 2^(15 - distance), twice as f16; NaN for a NaN scale.
uint factor_of(uint peak, uint scale, uint more) {
    uint code = (30u - ((peak - scale) >> 23) - more) << 10;
    code = scale > INFINITY_BITS ? 0x7E00u : code;
    return code | code << 16;
}

struct Peaks {
    uint a[CHUNKS];
    uint b[CHUNKS];
};
uint a_scales[CHUNKS];
uint b_scales[CHUNKS];

void fetch_scales(Tile t, uint block) {
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        uint x = packed_x(i * 128u + gl_LocalInvocationIndex);
        a_scales[i] = push.operands.a_scales.v[t.a_scale + block * TILE + x];
        b_scales[i] = push.operands.b_scales.v[t.b_scale + block * TILE + (scaled_b != 0u ? x : 0u)];
    }
}

void take_scales(Peaks peaks) {
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        if (scaled_b != 0u) {
            a_factor[i] = factor_of(peaks.a[i], a_scales[i], 0u);
            b_factor[i] = factor_of(peaks.b[i], b_scales[i], 0u);
        } else {
            bool nan = b_scales[i] > INFINITY_BITS;
            uint below = nan ? 0u : (peaks.b[i] - b_scales[i]) >> 23;
            a_factor[i] = factor_of(peaks.a[i], nan ? b_scales[i] : a_scales[i], below);
        }
    }
}

#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>
ACCUMULATOR sums[fragments_m * fragments_n];

void multiply(uint warp_m, uint warp_n) {
    [[unroll]] for (uint k = 0u; k < 32u; k += mma_k) {
        coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a[fragments_m];
        [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
            coopMatLoad(a[i], a_stage, (warp_m + i * mma_m) * ROW + k / 8u, ROW,
                        gl_CooperativeMatrixLayoutRowMajor);
        }
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
            coopMatLoad(b, b_stage, (warp_n + j * mma_n) * ROW + k / 8u, ROW,
                        gl_CooperativeMatrixLayoutColumnMajor);
            [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                sums[j * fragments_m + i] = coopMatMulAdd(a[i], b, sums[j * fragments_m + i]);
            }
        }
    }
}

// Loads run one step ahead of what is staged, which is one step ahead of what is multiplied. The
// last step is fetched and staged once more than it is needed. Two steps at a time, because there
// are two sets of loads.
void sum_up(Tile t, uint warp_m, uint warp_n) {
    Peaks peaks;
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        uint x = packed_x(i * 128u + gl_LocalInvocationIndex);
        peaks.a[i] = push.operands.a_peaks.v[t.a_peak + x];
        peaks.b[i] = push.operands.b_peaks.v[t.b_peak + (scaled_b != 0u ? x : 0u)];
    }
    uint last = t.blocks * 4u - 1u;
    fetch_scales(t, 0u);
    fetch(0u, t, 0u);
    take_scales(peaks);
    stage(0u);
    fetch(1u, t, 1u);
    fetch_scales(t, min(1u, t.blocks - 1u));
    uint step = 1u;
    do {
        barrier();
        fetch(0u, t, min(step + 1u, last));
        multiply(warp_m, warp_n);
        barrier();
        stage(1u);
        barrier();
        fetch(1u, t, min(step + 2u, last));
        multiply(warp_m, warp_n);
        barrier();
        if (step % 4u == 3u) { // the next step begins a block
            take_scales(peaks);
            fetch_scales(t, min(step / 4u + 2u, t.blocks - 1u));
        }
        stage(0u);
        step += 2u;
    } while (step <= last);
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

// Each subgroup passes its matrices one by one through its own part of a_stage.
void store_sums(Tile t, uvec2 d, uint row0, uint row_end, uint column0, uint warp_m, uint warp_n) {
    uint part = gl_SubgroupID * PART;
    int constant = scaled_b != 0u ? -14 : 1;
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        subgroup_shared_barrier();
        coopMatStore(sums[i], a_stage, part, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_shared_barrier();
        uint m = warp_m + i % fragments_m * mma_m, n = warp_n + i / fragments_m * mma_n;
        for (uint quad = gl_SubgroupInvocationID; quad < PART; quad += gl_SubgroupSize) {
            uint row = m + quad / (mma_n / 4u);
            uint column = n + quad % (mma_n / 4u) * 4u;
            if (row0 + row < row_end && column0 + column < push.n) {
                vec4 x = uintBitsToFloat(a_stage[part + quad]);
                int of_row = exponent_of(push.operands.a_peaks.v[t.a_peak + row]) + constant;
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    uint peak = push.operands.b_peaks.v[t.b_peak + column + e];
                    x[e] = raised(x[e], of_row + exponent_of(peak));
                }
                store(d, row0 + row, column0 + column, x);
            }
        }
    }
}

vec4 codes_of(uvec4 chunk, uint quad) {
    return fp8_decode4(FP8_E4M3, chunk[quad]);
}

// The slow loop: an invocation computes a row.
void store_slowly(Tile t, uvec2 d, uint row0, uint row_end, uint column0) {
    for (uint row = gl_LocalInvocationIndex; row < TILE && row0 + row < row_end; row += local_size) {
        for (uint column = 0u; column < TILE && column0 + column < push.n; column += 4u) {
            vec4 sum = vec4(0);
            for (uint step = 0u; step < t.blocks * 8u; ++step) {
                uint at = step / 2u * PACKED_STEP, part = step % 2u, block = step / 8u * TILE;
                uvec4 a = push.operands.a_codes.v[t.a + at + packed_chunk(row, part)];
                float a_scale = uintBitsToFloat(push.operands.a_scales.v[t.a_scale + block + row]);
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    uint x = column + e;
                    uvec4 b = push.operands.b_codes.v[t.b + at + packed_chunk(x, part)];
                    float b_scale =
                        uintBitsToFloat(push.operands.b_scales.v[t.b_scale + block + x]);
                    [[unroll]] for (uint q = 0u; q < 4u; ++q) {
                        vec4 left = codes_of(a, q) * a_scale, right = codes_of(b, q) * b_scale;
                        [[unroll]] for (uint c = 0u; c < 4u; ++c) {
                            sum[e] = fma(left[c], right[c], sum[e]);
                        }
                    }
                }
            }
            store(d, row0 + row, column0 + column, sum);
        }
    }
}

void main() {
    // Bands of `band` tiles along m, as in gemm_coopmat_dense.glsl.
    uint index = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    uint in_band = band * gl_NumWorkGroups.y;
    uint first = index / in_band * band;
    uint height = min(band, gl_NumWorkGroups.x - first);
    uint m_tile = first + index % in_band % height, n_tile = index % in_band / height;

    Tile t;
    uvec2 d = uvec2(push.operands.d);
    uint row0, row_end, a_unit = m_tile, b_unit, b_tile = n_tile, begin = 0u;
    if (by_sum != 0u) {
        uint g = gl_WorkGroupID.z;
        uint k = push.operands.begins.v[g];
        uint rows = push.operands.ends.v[g] - k;
        if (rows == 0u && push.accumulate != 0u) {
            return;
        }
        begin = k / 128u + g;
        t.blocks = (rows + 127u) / 128u;
        row0 = m_tile * TILE;
        row_end = push.m;
        a_unit += g * gl_NumWorkGroups.x;
        b_unit = g * gl_NumWorkGroups.y + n_tile;
        d = address_add(d, g, push.stride_d, D_LOG2_BYTES);
    } else {
        uint g = gl_WorkGroupID.z;
        row0 = m_tile * TILE;
        row_end = push.m;
        if (push.from_list != 0u) {
            g = push.operands.tiles.v[2u * m_tile];
            row0 = push.operands.tiles.v[2u * m_tile + 1u];
            row_end = push.operands.ends.v[g];
        } else {
            m_tile += g * gl_NumWorkGroups.x;
            a_unit = m_tile;
            d = address_add(d, g, push.stride_d, D_LOG2_BYTES);
        }
        t.blocks = push.blocks;
        b_tile += g * gl_NumWorkGroups.y;
        b_unit = b_tile;
    }
    t.a_scale = (m_tile * push.blocks + begin) * TILE;
    t.b_scale = (b_tile * push.blocks + begin) * TILE;
    t.a = t.a_scale / TILE * PACKED_BLOCK;
    t.b = t.b_scale / TILE * PACKED_BLOCK;
    t.a_peak = a_unit * TILE;
    t.b_peak = b_unit * TILE;

    uint of_a = push.operands.a_spread.v[a_unit], of_b = push.operands.b_spread.v[b_unit];
    if (t.blocks == 0u || (scaled_b != 0u ? max(of_a, of_b) : of_a + of_b) > SPREAD) {
        store_slowly(t, d, row0, row_end, n_tile * TILE);
        return;
    }
    uint warp_m = gl_SubgroupID % warps_m * fragments_m * mma_m;
    uint warp_n = gl_SubgroupID / warps_m * fragments_n * mma_n;
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    sum_up(t, warp_m, warp_n);
    barrier();
    store_sums(t, d, row0, row_end, n_tile * TILE, warp_m, warp_n);
}
