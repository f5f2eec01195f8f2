// SPDX-License-Identifier: MIT
// The workgroup tile of a GEMM of bf16 operands on matrix units (GL_KHR_cooperative_matrix). A
// workgroup of warps_m x warps_n subgroups computes BLOCK_M x BLOCK_N elements of D; each subgroup
// has fragments_m x fragments_n matrices of mma_m x mma_n. Per block_k of the sum the workgroup
// copies its parts of A and B to shared memory (as they are, or as f16 with MATRIX_BF16 = 0), while
// the loads of the next block are under way. Sums are f32, in ascending steps of mma_k from k_begin:
// the same bits whatever the other constants. What lies beyond k_end counts as 0.
//
// GEMM_FORM: 0 nt  A[M,K] B[N,K]   1 nn  A[M,K] B[K,N]   2 tn  A[K,M] B[K,N]
// Constants of the kernel: see gemm_coopmat_nt.comp.
// Shared memory: bellows::GemmTile::shared_bytes counts a_stage and b_stage below.
#ifndef BELLOWS_GEMM_COOPMAT_GLSL
#define BELLOWS_GEMM_COOPMAT_GLSL

#include "coopmat_tile.glsl"
#include "gemm_operands.glsl"
#include "matrix_type.glsl"

#define BLOCK_M (mma_m * fragments_m * warps_m)
#define BLOCK_N (mma_n * fragments_n * warps_n)
#define OF_GROUP(x) (x)
#define PADDING 8u // elements between staged rows, against bank conflicts

// An operand's block is staged as rows of block_k elements, or, where memory has k as its rows and
// `turn` is 0, as memory has it: block_k rows.
#define A_BY_K (GEMM_FORM == 2)
#define B_BY_K (GEMM_FORM != 0)
#if A_BY_K
#define A_ROWS (turn != 0u ? BLOCK_M : block_k)
#define A_COLUMNS (turn != 0u ? block_k : BLOCK_M)
#else
#define A_ROWS BLOCK_M
#define A_COLUMNS block_k
#endif
#if B_BY_K
#define B_ROWS (turn != 0u ? BLOCK_N : block_k)
#define B_COLUMNS (turn != 0u ? block_k : BLOCK_N)
#else
#define B_ROWS BLOCK_N
#define B_COLUMNS block_k
#endif

// Eight elements to a uvec4. After the sum a_stage passes D from the matrices to memory, four
// floats to a uvec4.
#define A_STRIDE ((A_COLUMNS + PADDING) / 8u)
#define B_STRIDE ((B_COLUMNS + PADDING) / 8u)
#define A_STAGE (A_ROWS * A_STRIDE)
#define B_STAGE (B_ROWS * B_STRIDE)
#define D_PART (mma_m * mma_n / 4u)
#define D_STAGE (warps_m * warps_n * D_PART)
shared uvec4 a_stage[stages * A_STAGE > D_STAGE ? stages * A_STAGE : D_STAGE];
shared uvec4 b_stage[stages * B_STAGE];

// Eight neighbours in memory of an operand whose element (x, k) stands at x * ld + k or, by_k, at
// k * ld + x. Nothing is done with what is loaded, so that nobody waits for it yet: x beyond the
// extent gives some other row or column (its products are not stored), k beyond k_end some other k
// (see trim) unless the elements come one by one; they are 0 then.
uvec4 load_octet(uvec2 base, uint ld, bool by_k, uint x, uint extent, uint k, uint k_end) {
    if (aligned != 0u) {
        uint row = min(x, by_k ? extent - 8u : extent - 1u);
        uint depth = min(k, by_k ? k_end - 1u : k_end - 8u);
        return ReadUvec4(base).v[(by_k ? depth * ld + row : row * ld + depth) >> 3];
    }
    uvec4 codes;
    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
        vec2 pair;
        [[unroll]] for (uint odd = 0u; odd < 2u; ++odd) {
            uint ahead = 2u * e + odd;
            uint row = min(by_k ? x + ahead : x, extent - 1u);
            uint depth = by_k ? k : k + ahead;
            uint clamped = min(depth, k_end - 1u);
            float value = bf16_load(base, by_k ? clamped * ld + row : row * ld + clamped);
            pair[odd] = depth < k_end ? value : 0.0;
        }
        codes[e] = floatBitsToUint(pair.x) >> 16 | (floatBitsToUint(pair.y) & 0xFFFF0000u);
    }
    return codes;
}

// What an invocation carries of the next block, eight elements each.
#define A_OCTETS (BLOCK_M * block_k / 8u / local_size)
#define B_OCTETS (BLOCK_N * block_k / 8u / local_size)
uvec4 a_next[A_OCTETS];
uvec4 b_next[B_OCTETS];

// Where an invocation's i-th octet starts in a block, as (row or column of D, k). Octets that are
// staged as memory has them count along the rows of memory; those that are turned come in pairs of
// neighbouring k, the pairs counting with k fastest.
uvec2 octet_start(bool by_k, uint block, uint i) {
    if (by_k && turn != 0u) {
        uint item = i / 2u * local_size + gl_LocalInvocationIndex;
        return uvec2(item / (block_k / 2u) * 8u, item % (block_k / 2u) * 2u + i % 2u);
    }
    uint item = i * local_size + gl_LocalInvocationIndex;
    return by_k ? uvec2(item % (block / 8u) * 8u, item / (block / 8u))
                : uvec2(item / (block_k / 8u), item % (block_k / 8u) * 8u);
}

void fetch(CoopmatTile t, uint k) {
    [[unroll]] for (uint i = 0u; i < A_OCTETS; ++i) {
        uvec2 at = octet_start(A_BY_K, BLOCK_M, i);
        a_next[i] = load_octet(t.a, t.lda, A_BY_K, t.m0 + at.x, t.rows, k + at.y, t.k_end);
    }
    [[unroll]] for (uint i = 0u; i < B_OCTETS; ++i) {
        uvec2 at = octet_start(B_BY_K, BLOCK_N, i);
        b_next[i] = load_octet(t.b, t.ldb, B_BY_K, t.n0 + at.x, t.columns, k + at.y, t.k_end);
    }
}

// Clears what lies beyond k_end in a last block of less than block_k.
void trim(CoopmatTile t, uint k) {
    [[unroll]] for (uint i = 0u; i < A_OCTETS; ++i) {
        if (k + octet_start(A_BY_K, BLOCK_M, i).y >= t.k_end) {
            a_next[i] = uvec4(0);
        }
    }
    [[unroll]] for (uint i = 0u; i < B_OCTETS; ++i) {
        if (k + octet_start(B_BY_K, BLOCK_N, i).y >= t.k_end) {
            b_next[i] = uvec4(0);
        }
    }
}

#define STAGE(name, next, octets, BY_K, columns, to, stride)                                       \
    void name(uint start) {                                                                        \
        if (BY_K && turn != 0u) {                                                                  \
            [[unroll]] for (uint i = 0u; i < octets / 2u; ++i) {                                   \
                uint item = i * local_size + gl_LocalInvocationIndex;                              \
                uint pair = item % (block_k / 2u);                                                 \
                uint at = start + item / (block_k / 2u) * 8u * stride + pair / 4u;                 \
                uvec4 low = next[2u * i], high = next[2u * i + 1u];                                \
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {                                        \
                    to[at + 2u * e * stride][pair % 4u] =                                          \
                        matrix_codes((low[e] & 0xFFFFu) | high[e] << 16);                          \
                    to[at + (2u * e + 1u) * stride][pair % 4u] =                                   \
                        matrix_codes(low[e] >> 16 | (high[e] & 0xFFFF0000u));                      \
                }                                                                                  \
            }                                                                                      \
        } else {                                                                                   \
            [[unroll]] for (uint i = 0u; i < octets; ++i) {                                        \
                uint item = i * local_size + gl_LocalInvocationIndex;                              \
                uvec4 x = next[i];                                                                 \
                to[start + item / (columns / 8u) * stride + item % (columns / 8u)] =               \
                    uvec4(matrix_codes(x.x), matrix_codes(x.y), matrix_codes(x.z),                 \
                          matrix_codes(x.w));                                                      \
            }                                                                                      \
        }                                                                                          \
    }
STAGE(stage_a, a_next, A_OCTETS, A_BY_K, A_COLUMNS, a_stage, A_STRIDE)
STAGE(stage_b, b_next, B_OCTETS, B_BY_K, B_COLUMNS, b_stage, B_STRIDE)

// Puts the fetched block, which starts at k, where stage number `to` is.
void stage(CoopmatTile t, uint k, uint to) {
    if (aligned != 0u && t.k_end - k < block_k) {
        trim(t, k);
    }
    stage_a(to * A_STAGE);
    stage_b(to * B_STAGE);
}

#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>
ACCUMULATOR sums[fragments_m * fragments_n];

void multiply(uint from, uint warp_m, uint warp_n) {
    uint a_start = from * A_STAGE, b_start = from * B_STAGE;
    [[unroll]] for (uint k = 0u; k < block_k; k += mma_k) {
        coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA> a[fragments_m];
        [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
            uint m = warp_m + i * mma_m;
            if (A_BY_K && turn == 0u) {
                coopMatLoad(a[i], a_stage, a_start + k * A_STRIDE + m / 8u, A_STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
            } else {
                coopMatLoad(a[i], a_stage, a_start + m * A_STRIDE + k / 8u, A_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
            }
        }
        [[unroll]] for (uint j = 0u; j < fragments_n; ++j) {
            coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB> b;
            uint n = warp_n + j * mma_n;
            if (B_BY_K && turn == 0u) {
                coopMatLoad(b, b_stage, b_start + k * B_STRIDE + n / 8u, B_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
            } else {
                coopMatLoad(b, b_stage, b_start + n * B_STRIDE + k / 8u, B_STRIDE,
                            gl_CooperativeMatrixLayoutColumnMajor);
            }
            [[unroll]] for (uint i = 0u; i < fragments_m; ++i) {
                sums[j * fragments_m + i] = coopMatMulAdd(a[i], b, sums[j * fragments_m + i]);
            }
        }
    }
}

// A lane's fours of a matrix of D.
#define LANES (local_size / (warps_m * warps_n))
#define LANE_QUADS ((D_PART + LANES - 1u) / LANES)

struct Destination {
    uvec2 d;
    uint ldd;
    float alpha;
    bool accumulate;
    uint row; // of the subgroup's first matrix
    uint column;
    uint rows; // of D
    uint columns;
};

// What D holds of a column of matrices, loaded ahead of them all, so that a subgroup waits for it
// once and not for each.
vec4 old[fragments_m * LANE_QUADS];

void load_old(Destination to, uint j) {
    [[unroll]] for (uint i = 0u; i < fragments_m * LANE_QUADS; ++i) {
        uint quad = i % LANE_QUADS * LANES + gl_SubgroupInvocationID;
        uint row = to.row + i / LANE_QUADS * mma_m + quad / (mma_n / 4u);
        uint column = to.column + j * mma_n + quad % (mma_n / 4u) * 4u;
        old[i] = vec4(0);
        if (aligned != 0u && to.accumulate && quad < D_PART && row < to.rows &&
            column < to.columns) {
            old[i] = load_d4(to.d, row * to.ldd + column);
        }
    }
}

// Through the subgroup's own part of a_stage. Indices are kept below the sizes of arrays: where there
// is no such matrix this is not reached, but lavapipe's compiler fails at an index behind the last.
void store_matrix(Destination to, uint i, uint j) {
    uint part = gl_SubgroupID * D_PART;
    subgroup_shared_barrier();
    coopMatStore(sums[(j * fragments_m + i) % (fragments_m * fragments_n)], a_stage, part,
                 mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
    subgroup_shared_barrier();
    [[unroll]] for (uint q = 0u; q < LANE_QUADS; ++q) {
        uint quad = q * LANES + gl_SubgroupInvocationID;
        uint row = to.row + i * mma_m + quad / (mma_n / 4u);
        uint column = to.column + j * mma_n + quad % (mma_n / 4u) * 4u;
        if (quad < D_PART && row < to.rows && column < to.columns) {
            vec4 x = uintBitsToFloat(a_stage[part + quad]);
            uint at = row * to.ldd + column;
            if (aligned != 0u) {
                store_d4_on(to.d, at, x, old[i % fragments_m * LANE_QUADS + q], to.alpha,
                            to.accumulate);
            } else {
                store_d_part(to.d, at, x, min(to.columns - column, 4u), to.alpha, to.accumulate);
            }
        }
    }
}

// A subgroup's tile is at most eight by eight matrices.
#define STORE_MATRIX(i)           \
    if (i < fragments_m) {        \
        store_matrix(to, i, j);   \
    }

void store_column(Destination to, uint j) {
    load_old(to, j);
    UP_TO_8(STORE_MATRIX)
}

#define STORE_COLUMN(j)           \
    if (j < fragments_n) {        \
        store_column(to, j);      \
    }

void store_sums(CoopmatTile t, uint warp_m, uint warp_n, uvec2 d, uint ldd, float alpha,
                bool accumulate) {
    Destination to = Destination(d, ldd, alpha, accumulate, t.m0 + warp_m, t.n0 + warp_n, t.rows,
                                 t.columns);
    UP_TO_8(STORE_COLUMN)
}

// All invocations of the workgroup call it together. With two stages a block is staged while the
// other is being read: one barrier per block.
void gemm_coopmat(CoopmatTile t, uvec2 d, uint ldd, float alpha, bool accumulate) {
    uint warp_m = gl_SubgroupID % warps_m * fragments_m * mma_m;
    uint warp_n = gl_SubgroupID / warps_m * fragments_n * mma_n;
    [[unroll]] for (uint i = 0u; i < fragments_m * fragments_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    if (t.k_begin < t.k_end) {
        uint k = t.k_begin, now = 0u;
        fetch(t, k);
        stage(t, k, now);
        if (t.k_end - k > block_k) {
            do {
                barrier();
                k += block_k;
                fetch(t, k);
                multiply(now, warp_m, warp_n);
                if (stages == 1u) {
                    barrier();
                } else {
                    now = 1u - now;
                }
                stage(t, k, now);
            } while (t.k_end - k > block_k);
        }
        barrier();
        multiply(now, warp_m, warp_n);
        barrier();
    }
    store_sums(t, warp_m, warp_n, d, ldd, alpha, accumulate);
}

#endif
