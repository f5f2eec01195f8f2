// SPDX-License-Identifier: MIT
// Causal attention and its gradients on matrix units. A workgroup owns BLOCK_R rows (queries, or
// keys where the gradients of keys and values are summed), each subgroup mma_m of them; the others
// (keys, or queries) come in blocks of `block` through workgroup memory:
//   scores   s = x * transpose(x of the block), where needed dp = y * transpose(y of the block)
//   weights  of s and dp, in the lanes, rounded to the matrix type
//   sums    += weights * y or x of the block
// x are queries or keys (qk_dim), y values or gradients of outputs (v_dim).
//
// ROLE: 0 forward   rows q; block k, v; sums over v
//       1 grad_q    rows q, grad_o; block k, v; sums over k
//       2 grad_k    rows k, v; block q, grad_o; sums over q
//       3 grad_v    rows k; block q, grad_o; sums over grad_o
// Constants of the kernel: see attention_coopmat_forward.comp.
// Shared memory: bellows::ops::AttentionTile counts `memory` below.
#ifndef BELLOWS_ATTENTION_COOPMAT_GLSL
#define BELLOWS_ATTENTION_COOPMAT_GLSL

#include "matrix_type.glsl"

#extension GL_KHR_shader_subgroup_shuffle : require

#define ROWS_ARE_QUERIES (ROLE < 2)
#define NEEDS_DP (ROLE == 1 || ROLE == 2)
#define SUMS_OVER_Y (ROLE == 0 || ROLE == 3)

const float kLog2E = 1.4426950408889634;
const float kLn2 = 0.6931471805599453;
const float kLowest = -3.0e38;

// Eight elements of the matrix type to a uvec4, or four floats. Rows are padded against bank
// conflicts.
#define BLOCK_R (mma_m * warps)
#define X_STRIDE ((qk_dim + 8u) / 8u)
#define Y_STRIDE ((v_dim + 8u) / 8u)
#define S_STRIDE ((block + 4u) / 4u)
#define W_STRIDE ((block + 8u) / 8u)
#define Y_START (block * X_STRIDE)
#define STATISTICS_START (Y_START + block * Y_STRIDE)
#define SCRATCH_START (STATISTICS_START + block / 2u)
#define S_PART (mma_m * S_STRIDE)
#define SCRATCH_PART (2u * S_PART + mma_m * W_STRIDE)
#define BLOCK_MEMORY (SCRATCH_START + warps * SCRATCH_PART)
#define ROW_MEMORY (BLOCK_R * (qk_dim > v_dim ? X_STRIDE : Y_STRIDE))
shared uvec4 memory[BLOCK_MEMORY > ROW_MEMORY ? BLOCK_MEMORY : ROW_MEMORY];

#define LANES (local_size / warps)
#define LANES_PER_ROW (LANES / mma_m)
#define OWN (block / LANES_PER_ROW) // columns of a row whose weights a lane computes

#define MATRIX_A coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_B coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

// One head of one sequence: element d of token t at t * stride + d, in elements of 2 bytes.
struct Head {
    uvec2 base;
    uint stride;
};

Head head_of(uvec2 tensor, uint token_stride, uint head_stride) {
    uvec2 base = address_add(tensor, gl_WorkGroupID.z * push.seq, token_stride, 1u);
    return Head(address_add(base, gl_WorkGroupID.y, head_stride, 1u), token_stride);
}

// Tokens first .. first + count - 1, clamped to the last one, where `to` is.
void stage(Head from, uint first, uint count, uint dim, uint to, uint stride) {
    uint octets = dim / 8u;
    for (uint item = gl_LocalInvocationIndex; item < count * octets; item += local_size) {
        uint token = min(first + item / octets, push.seq - 1u);
        uvec4 x = ReadUvec4(from.base).v[token * (from.stride / 8u) + item % octets];
        memory[to + item / octets * stride + item % octets] =
            uvec4(matrix_codes(x.x), matrix_codes(x.y), matrix_codes(x.z), matrix_codes(x.w));
    }
}

// The subgroup's rows of what has been staged at 0, of `count` matrices.
#define LOAD_ROWS(a, count, stride)                                                                \
    [[unroll]] for (uint i_ = 0u; i_ < count; ++i_) {                                              \
        coopMatLoad(a[i_], memory, gl_SubgroupID * mma_m * stride + i_ * mma_k / 8u, stride,       \
                    gl_CooperativeMatrixLayoutRowMajor);                                           \
    }

// The subgroup's rows times the transpose of the block, as floats where `to` is.
#define SCORES(a, count, start, stride, to)                                                        \
    [[unroll]] for (uint j_ = 0u; j_ < block / mma_n; ++j_) {                                      \
        ACCUMULATOR score_ = ACCUMULATOR(0.0);                                                     \
        [[unroll]] for (uint i_ = 0u; i_ < count; ++i_) {                                          \
            MATRIX_B b_;                                                                           \
            coopMatLoad(b_, memory, start + j_ * mma_n * stride + i_ * mma_k / 8u, stride,         \
                        gl_CooperativeMatrixLayoutColumnMajor);                                    \
            score_ = coopMatMulAdd(a[i_], b_, score_);                                             \
        }                                                                                          \
        coopMatStore(score_, memory, to + j_ * mma_n / 4u, S_STRIDE,                               \
                     gl_CooperativeMatrixLayoutRowMajor);                                          \
    }

#if SUMS_OVER_Y
#define SUM_DIM v_dim
#define SUM_START Y_START
#define SUM_STRIDE Y_STRIDE
#else
#define SUM_DIM qk_dim
#define SUM_START 0u
#define SUM_STRIDE X_STRIDE
#endif

layout(local_size_x_id = 0) in;

void main() {
    Head q = head_of(uvec2(push.operands.q), push.q_token, push.q_head);
    Head k = head_of(uvec2(push.operands.k), push.k_token, push.k_head);
#if ROLE == 0
    Head v = head_of(uvec2(push.operands.v), push.v_token, push.v_head);
#define X_ROWS q
#define X_BLOCK k
#define Y_BLOCK v
#elif ROLE == 1
    Head v = head_of(uvec2(push.operands.v), push.v_token, push.v_head);
    Head grad_o = head_of(uvec2(push.operands.grad_o), push.grad_o_token, push.grad_o_head);
#define X_ROWS q
#define Y_ROWS grad_o
#define X_BLOCK k
#define Y_BLOCK v
#else
    Head grad_o = head_of(uvec2(push.operands.grad_o), push.grad_o_token, push.grad_o_head);
#if ROLE == 2
    Head v = head_of(uvec2(push.operands.v), push.v_token, push.v_head);
#define Y_ROWS v
#endif
#define X_ROWS k
#define X_BLOCK q
#define Y_BLOCK grad_o
#endif

    // Rows with more to sum start first.
#if ROWS_ARE_QUERIES
    uint first_row = (gl_NumWorkGroups.x - 1u - gl_WorkGroupID.x) * BLOCK_R;
#else
    uint first_row = gl_WorkGroupID.x * BLOCK_R;
#endif
    uint first_of_warp = first_row + gl_SubgroupID * mma_m;
    uint last = push.seq - 1u;
    uint lane_row = gl_SubgroupInvocationID / LANES_PER_ROW;
    uint part = gl_SubgroupInvocationID % LANES_PER_ROW;
    uint row = min(first_of_warp + lane_row, last); // those beyond are computed, never stored
    uint statistics = gl_WorkGroupID.z * push.seq * push.heads + gl_WorkGroupID.y;

    stage(X_ROWS, first_row, BLOCK_R, qk_dim, 0u, X_STRIDE);
    barrier();
    MATRIX_A x[qk_dim / mma_k];
    LOAD_ROWS(x, qk_dim / mma_k, X_STRIDE)
#if NEEDS_DP
    barrier();
    stage(Y_ROWS, first_row, BLOCK_R, v_dim, 0u, Y_STRIDE);
    barrier();
    MATRIX_A y[v_dim / mma_k];
    LOAD_ROWS(y, v_dim / mma_k, Y_STRIDE)
#endif
    ACCUMULATOR sums[SUM_DIM / mma_n];
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }

    float scale = push.scale * kLog2E; // powers of two: exp2 needs no multiplication
#if ROLE == 0
    float top = kLowest, total = 0.0;
#elif ROLE == 1
    float lse = push.operands.lse.v[statistics + row * push.heads] * kLog2E;
    float delta = push.operands.delta.v[statistics + row * push.heads];
#endif
    uint s_start = SCRATCH_START + gl_SubgroupID * SCRATCH_PART, dp_start = s_start + S_PART,
         w_start = dp_start + S_PART;

#if ROWS_ARE_QUERIES
    uint first = 0u, end = min(push.seq, first_row + BLOCK_R);
#else
    uint first = first_row / block * block, end = push.seq;
#endif
    do {
        barrier();
        stage(X_BLOCK, first, block, qk_dim, 0u, X_STRIDE);
        stage(Y_BLOCK, first, block, v_dim, Y_START, Y_STRIDE);
#if !ROWS_ARE_QUERIES
        for (uint c = gl_LocalInvocationIndex; c < block; c += local_size) {
            uint index = statistics + min(first + c, last) * push.heads;
            memory[STATISTICS_START + c / 4u][c % 4u] =
                floatBitsToUint(push.operands.lse.v[index] * kLog2E);
#if NEEDS_DP
            memory[STATISTICS_START + block / 4u + c / 4u][c % 4u] =
                floatBitsToUint(push.operands.delta.v[index]);
#endif
        }
#endif
        barrier();
#if ROWS_ARE_QUERIES
        bool seen = first < first_of_warp + mma_m;
#else
        bool seen = first + block > first_of_warp;
#endif
        if (seen) {
            SCORES(x, qk_dim / mma_k, 0u, X_STRIDE, s_start)
#if NEEDS_DP
            SCORES(y, v_dim / mma_k, Y_START, Y_STRIDE, dp_start)
#endif
            subgroup_shared_barrier();
            uint s_row = s_start + lane_row * S_STRIDE;
#if ROLE == 0
            float new_top = top;
            [[unroll]] for (uint c = 0u; c < OWN; c += 4u) {
                vec4 s = uintBitsToFloat(memory[s_row + (part * OWN + c) / 4u]) * scale;
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    new_top = first + part * OWN + c + e <= row ? max(new_top, s[e]) : new_top;
                }
            }
            [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
                new_top = max(new_top, subgroupShuffleXor(new_top, reach));
            }
            float correction = exp2(top - new_top);
            top = new_top;
            total *= correction;
#endif
            [[unroll]] for (uint octet = 0u; octet < OWN; octet += 8u) {
                vec4 w[2];
                [[unroll]] for (uint quad = 0u; quad < 2u; ++quad) {
                    uint c = part * OWN + octet + 4u * quad;
                    vec4 s = uintBitsToFloat(memory[s_row + c / 4u]);
#if NEEDS_DP
                    vec4 dp = uintBitsToFloat(memory[s_row + S_PART + c / 4u]);
#endif
#if !ROWS_ARE_QUERIES
                    vec4 lse = uintBitsToFloat(memory[STATISTICS_START + c / 4u]);
#if NEEDS_DP
                    vec4 delta = uintBitsToFloat(memory[STATISTICS_START + (block + c) / 4u]);
#endif
#endif
                    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                        uint other = first + c + e;
#if ROLE == 0
                        float p = other <= row ? exp2(fma(s[e], scale, -top)) : 0.0;
                        total += p;
#elif ROLE == 1
                        float p = other <= row ? exp2(fma(s[e], scale, -lse)) : 0.0;
                        p *= dp[e] - delta;
#else
                        bool sees = row <= other && other <= last;
                        float p = sees ? exp2(fma(s[e], scale, -lse[e])) : 0.0;
#if NEEDS_DP
                        p *= dp[e] - delta[e];
#endif
#endif
                        w[quad][e] = p;
                    }
                }
                memory[w_start + lane_row * W_STRIDE + (part * OWN + octet) / 8u] =
                    uvec4(matrix_pack(w[0]), matrix_pack(w[1]));
            }
#if ROLE == 0
            // What the sums so far count for, as a matrix of equal columns.
            bool fades = subgroupBallot(correction < 1.0) != uvec4(0);
            if (fades) {
                for (uint quad = part; quad < mma_n / 4u; quad += LANES_PER_ROW) {
                    memory[dp_start + lane_row * (mma_n / 4u) + quad] =
                        floatBitsToUint(vec4(correction));
                }
            }
#endif
            subgroup_shared_barrier();
#if ROLE == 0
            if (fades) {
                ACCUMULATOR factors;
                coopMatLoad(factors, memory, dp_start, mma_n / 4u,
                            gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
                    sums[i] *= factors;
                }
            }
#endif
            [[unroll]] for (uint c = 0u; c < block; c += mma_k) {
                MATRIX_A w;
                coopMatLoad(w, memory, w_start + c / 8u, W_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
                [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
                    MATRIX_B b;
                    coopMatLoad(b, memory, SUM_START + c * SUM_STRIDE + i * mma_n / 8u, SUM_STRIDE,
                                gl_CooperativeMatrixLayoutRowMajor);
                    sums[i] = coopMatMulAdd(w, b, sums[i]);
                }
            }
        }
        first += block;
    } while (first < end);

    bool stored = first_of_warp + lane_row <= last;
#if ROLE == 0
    [[unroll]] for (uint reach = 1u; reach < LANES_PER_ROW; reach *= 2u) {
        total += subgroupShuffleXor(total, reach);
    }
    if (part == 0u && stored) {
        push.operands.lse.v[statistics + row * push.heads] = (top + log2(total)) * kLn2;
    }
    Head result = head_of(uvec2(push.operands.o), push.o_token, push.o_head);
    float factor = 1.0 / total;
#elif ROLE == 1
    Head result = head_of(uvec2(push.operands.grad_q), push.grad_q_token, push.grad_q_head);
    float factor = push.scale;
#elif ROLE == 2
    Head result = head_of(uvec2(push.operands.grad_k), push.grad_k_token, push.grad_k_head);
    float factor = push.scale;
#else
    Head result = head_of(uvec2(push.operands.grad_v), push.grad_v_token, push.grad_v_head);
    float factor = 1.0;
#endif
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        subgroup_shared_barrier();
        coopMatStore(sums[i], memory, s_start, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_shared_barrier();
        if (stored) {
            for (uint octet = part; octet < mma_n / 8u; octet += LANES_PER_ROW) {
                uint at = s_start + lane_row * (mma_n / 4u) + 2u * octet;
                vec4 low = uintBitsToFloat(memory[at]) * factor,
                     high = uintBitsToFloat(memory[at + 1u]) * factor;
                WriteUvec4(result.base)
                    .v[row * (result.stride / 8u) + i * mma_n / 8u + octet] =
                    uvec4(bf16_pack(low), bf16_pack(high));
            }
        }
    }
}

#endif
