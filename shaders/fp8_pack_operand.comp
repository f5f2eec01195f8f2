// SPDX-License-Identifier: MIT
// Packs B, or an A whose sum runs along its columns (by_k), for fp8_packed_gemm:
// include/fp8_packed.glsl. Runs after fp8_pack_scales, whose batch and groups it shares. A code that
// is NaN makes NaN its block: of A by itself, of B by the block's scale.
//
// source  codes, rows of a multiple of 16 bytes that end in zeros. by_k 0: memory has x as its rows,
//         (x, k) at x * ld + k. by_k 1: memory has k as its rows, (x, k) at k * ld + x.
// Constants  local_size   128; subgroup: the subgroup size
//            mma_*        as the product's
//            b_slots, b_slot   as the product's
//            own_scales   (B) 1: columns have scales of their own, hence factors; 0: a block has one
// Dispatch x = blocks (of all groups), y = tiles. Shared 10 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#define MATRIX_BF16 0
#include "include/coopmat.glsl"
#include "include/fp8_groups.glsl"
#include "include/fp8_pack.glsl"

#include "fp8_pack_operand.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint ROWS = 32u;   // of memory, staged at a time
const uint PITCH = 17u;  // units of 16 bytes from one to the next: 128 f16 and padding
const uint CHUNKS = 8u;  // of 16 codes, per invocation
const uint IN_ROW = 8u;

shared uvec4 stage[ROWS * PITCH];
shared uint factors[TILE];
shared uint nans[TILE]; // which x, or the first alone of a block with one scale

#if OPERAND_B
#define MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define MMA_X mma_n
#define ELEMENTS ELEMENTS_B
#define LAYOUT_BY_X gl_CooperativeMatrixLayoutColumnMajor
#define LAYOUT_BY_K gl_CooperativeMatrixLayoutRowMajor
#else
#define MATRIX coopmat<float16_t, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MMA_X mma_m
#define ELEMENTS ELEMENTS_A
#define LAYOUT_BY_X gl_CooperativeMatrixLayoutRowMajor
#define LAYOUT_BY_K gl_CooperativeMatrixLayoutColumnMajor
#endif

MATRIX load(uint at) {
    MATRIX m;
    if (by_k != 0u) {
        coopMatLoad(m, stage, at, PITCH, LAYOUT_BY_K);
    } else {
        coopMatLoad(m, stage, at, PITCH, LAYOUT_BY_X);
    }
    return m;
}

uint pair_of(MATRIX m, uint i) {
    return packFloat2x16(f16vec2(m[2u * i], m[2u * i + 1u]));
}

// The matrices of one step of one group of MMA_X, which stand from `at` on in `stage`.
void save(uint at, uint along_k, uint place, uint step, uint matrix) {
    uint to = (place * 4u + step) * (TILE / MMA_X) + matrix;
#if OPERAND_B
    uint words[DEPTHS * ELEMENTS / 4u];
    [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
        MATRIX m = load(at + depth * along_k);
        [[unroll]] for (uint i = 0u; i < ELEMENTS / 4u; ++i) {
            uint second = pair_of(m, 2u * i + 1u);
            words[depth * (ELEMENTS / 4u) + i] = pair_of(m, 2u * i) | second >> 7 & 0x007F007Fu |
                                                 second >> 1 & 0x40004000u;
        }
    }
    const uint UNITS = DEPTHS * ELEMENTS / 16u;
    [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
        push.operands.image.v[(to * UNITS + u) * subgroup + gl_SubgroupInvocationID] =
            uvec4(words[4u * u], words[4u * u + 1u], words[4u * u + 2u], words[4u * u + 3u]);
    }
#else
    const uint UNITS = ELEMENTS / 8u;
    [[unroll]] for (uint depth = 0u; depth < DEPTHS; ++depth) {
        MATRIX m = load(at + depth * along_k);
        [[unroll]] for (uint u = 0u; u < UNITS; ++u) {
            push.operands.image.v[((to * DEPTHS + depth) * UNITS + u) * subgroup +
                                  gl_SubgroupInvocationID] =
                in_registers(uvec4(pair_of(m, 4u * u), pair_of(m, 4u * u + 1u),
                                   pair_of(m, 4u * u + 2u), pair_of(m, 4u * u + 3u)));
        }
    }
#endif
}

#if OPERAND_B
void save_factors(uint place) {
    if (gl_LocalInvocationIndex < TILE / 8u) {
        uvec4 eight;
        [[unroll]] for (uint i = 0u; i < 4u; ++i) {
            uint x = gl_LocalInvocationIndex * 8u + 2u * i;
            eight[i] = factors[x] & 0xFFFFu | factors[x + 1u] << 16;
        }
        for (uint k = 0u; k < mma_k; ++k) {
            stage[k * PITCH + gl_LocalInvocationIndex] = eight;
        }
    }
    barrier();
    for (uint j = gl_SubgroupID; j < TILE / mma_n; j += local_size / subgroup) {
        MATRIX m;
        coopMatLoad(m, stage, j * mma_n / 8u, PITCH, gl_CooperativeMatrixLayoutRowMajor);
        uint words[FACTOR_WORDS];
        [[unroll]] for (uint w = 0u; w < FACTOR_WORDS; ++w) {
            words[w] = 0u;
        }
        [[unroll]] for (uint e = 0u; e < ELEMENTS; ++e) { // of elements of a slot the last
            uint bit = COLUMN_SLOT(e) % 2u * 16u, word = COLUMN_SLOT(e) / 2u;
            uint bits = pair_of(m, e / 2u) >> e % 2u * 16u & 0xFFFFu;
            words[word] = words[word] & 0xFFFFu << 16u - bit | bits << bit;
        }
        [[unroll]] for (uint w = 0u; w < FACTOR_WORDS; ++w) {
            push.operands.factors.v[((place * (TILE / mma_n) + j) * FACTOR_WORDS + w) * subgroup +
                                    gl_SubgroupInvocationID] = words[w];
        }
    }
}
#endif

// Eight codes of a chunk, from code 8 * part on.
uvec4 staged(uvec4 codes, uint part, uint chunk, bool any_nan) {
    uvec4 y = eight_halves(codes, part);
#if !OPERAND_B
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (any_nan) {
            y[i] = with_nans(y[i], codes, part * 8u + 2u * i);
        }
        uint x = chunk * 16u + part * 8u + 2u * i;
        y[i] = times(y[i], factors[x] & 0xFFFFu | factors[x + 1u] << 16);
    }
#endif
    return y;
}

void mark(uvec4 codes, uint row, uint chunk) {
    for (uint i = 0u; i < 16u; ++i) {
        if (is_nan(codes, i)) {
            nans[own_scales == 0u ? 0u : by_k != 0u ? chunk * 16u + i : row] = 1u;
        }
    }
}

void main() {
    uint block = gl_WorkGroupID.x, tile = gl_WorkGroupID.y;
    uint x0 = tile % push.batch_tiles * TILE, end = push.extent, unit = tile;
    uvec2 source = address_add(uvec2(push.operands.source), tile / push.batch_tiles,
                               push.batch_stride16, 4u);
    TileRows depth = plain_tile(block, push.k);
    if (push.groups > 0u) {
        depth = grouped_tile(uvec2(push.operands.group_offsets), push.groups, block, push.k);
        unit += depth.group * gl_NumWorkGroups.y;
    }
    if (depth.end <= depth.first) {
        return;
    }
    uint lane = gl_LocalInvocationIndex, chunk = lane % IN_ROW;
    uvec4 codes[CHUNKS];
    [[unroll]] for (uint i = 0u; i < CHUNKS; ++i) {
        uint row = i * (TILE / CHUNKS) + lane / IN_ROW;
        uint x = x0 + (by_k != 0u ? chunk * 16u : row);
        uint k = depth.first + (by_k != 0u ? row : chunk * 16u);
        codes[i] = uvec4(0);
        if (x < end && k < depth.end) {
            codes[i] = ReadUvec4(source).v[by_k != 0u ? k * push.ld16 + x / 16u
                                                      : x * push.ld16 + k / 16u];
        }
    }
    uint place = tile * gl_NumWorkGroups.x + block;
    uint peak = push.operands.peaks.v[unit * TILE + lane];
    uint scale = push.operands.scales.v[place * TILE + lane];
    bool wide = push.operands.spread.v[unit] > SPREAD;
    factors[lane] = packed_factor(peak, wide && scale <= FP8_INFINITY ? peak : scale);
    nans[lane] = 0u;
    barrier();
    [[unroll]] for (uint part = 0u; part < TILE / ROWS; ++part) {
        [[unroll]] for (uint i = 0u; i < CHUNKS * ROWS / TILE; ++i) {
            uvec4 c = codes[part * (CHUNKS * ROWS / TILE) + i];
            uint row = i * (TILE / CHUNKS) + lane / IN_ROW, to = row * PITCH + chunk * 2u;
            bool any_nan = has_nan(c);
            stage[to] = staged(c, 0u, chunk, any_nan);
            stage[to + 1u] = staged(c, 1u, chunk, any_nan);
#if OPERAND_B
            if (any_nan) {
                mark(c, part * ROWS + row, chunk);
            }
#endif
        }
        barrier();
        if (by_k != 0u) {
            for (uint j = gl_SubgroupID; j < TILE / MMA_X; j += local_size / subgroup) {
                save(j * MMA_X / 8u, mma_k * PITCH, place, part, j);
            }
        } else {
            const uint MATRICES = ROWS / MMA_X;
            for (uint j = gl_SubgroupID; j < 4u * MATRICES; j += local_size / subgroup) {
                uint step = j / MATRICES, matrix = j % MATRICES;
                save(matrix * MMA_X * PITCH + step * 4u, mma_k / 8u, place, step,
                     part * MATRICES + matrix);
            }
        }
        barrier();
    }
#if OPERAND_B
    if (nans[own_scales == 0u ? 0u : lane] != 0u) {
        push.operands.scales.v[place * TILE + lane] = FP8_NAN;
        factors[lane] = 0x7E007E00u;
    }
    if (own_scales != 0u) {
        barrier();
        save_factors(place);
    }
#endif
}
