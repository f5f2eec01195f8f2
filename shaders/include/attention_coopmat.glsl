// SPDX-License-Identifier: MIT
// Causal attention and its gradients on matrix units. A workgroup owns BLOCK_R rows (queries, or
// keys where the gradients of keys and values are summed), each subgroup mma_m of them; the others
// (keys, or queries) come in blocks of `block` through workgroup memory:
//   scores   s = x * transpose(x of the block), where needed dp = y * transpose(y of the block)
//   weights  of s and dp, in the lanes, rounded to the matrix type
//   sums    += weights * y or x of the block
// x are queries or keys (qk_dim), y values or gradients of outputs (v_dim). Weights pass through
// workgroup memory, or stay where they are (in_lane): attention_in_memory.glsl and _in_lane.glsl.
//
// ROLE: 0 forward   rows q; block k, v; sums over v
//       1 grad_q    rows q, grad_o; block k, v; sums over k
//       2 grad_k    rows k, v; block q, grad_o; sums over q
//       3 grad_v    rows k; block q, grad_o; sums over grad_o
// Constants of the kernel: see attention_coopmat_forward.comp.
// Shared memory: bellows::ops::AttentionTile counts `memory` below.
#ifndef BELLOWS_ATTENTION_COOPMAT_GLSL
#define BELLOWS_ATTENTION_COOPMAT_GLSL

#include "attention_documents.glsl"
#include "matrix_slots.glsl"
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
#define SCRATCH_PART (in_lane != 0u ? 0u : 2u * S_PART + mma_m * W_STRIDE)
#define BLOCK_MEMORY (SCRATCH_START + warps * SCRATCH_PART)
#define TURN (warps > 4u ? 4u : warps) // subgroups that load their rows at a time
#define ROW_MEMORY (TURN * mma_m * (qk_dim > v_dim ? X_STRIDE : Y_STRIDE))
#define RESULT_PART (mma_m * mma_n / 4u)
#define RESULT_MEMORY (warps * RESULT_PART)
#define OUTER_MEMORY (ROW_MEMORY > RESULT_MEMORY ? ROW_MEMORY : RESULT_MEMORY)
shared uvec4 memory[BLOCK_MEMORY > OUTER_MEMORY ? BLOCK_MEMORY : OUTER_MEMORY];

#define LANES (local_size / warps)
#define LANES_PER_ROW (LANES / mma_m)

#define MATRIX_A coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_B coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

// One head of one sequence: element d of token t at t * stride + d, in elements of 2 bytes.
struct Head {
    uvec2 base;
    uint stride;
};

Head head_of(uvec2 tensor, uint head, uint token_stride, uint head_stride) {
    uvec2 base = address_add(tensor, gl_WorkGroupID.z * push.seq, token_stride, 1u);
    return Head(address_add(base, head, head_stride, 1u), token_stride);
}

// The row of a token of the sequence; beyond the last that one's.
uint token_of(uint in_sequence) {
    return gl_WorkGroupID.z * push.seq + min(in_sequence, push.seq - 1u);
}

uvec4 octet_of(Head from, uint token, uint octet) {
    return ReadUvec4(from.base).v[min(token, push.seq - 1u) * (from.stride / 8u) + octet];
}
uvec4 codes_of(uvec4 octet) {
    return uvec4(matrix_codes(octet.x), matrix_codes(octet.y), matrix_codes(octet.z),
                 matrix_codes(octet.w));
}

// Rows of TURN subgroups, at 0.
void stage_rows(Head from, uint first, uint dim, uint stride) {
    uint octets = dim / 8u;
    for (uint item = gl_LocalInvocationIndex; item < TURN * mma_m * octets; item += local_size) {
        memory[item / octets * stride + item % octets] =
            codes_of(octet_of(from, first + item / octets, item % octets));
    }
}

// A block on its way to workgroup memory: it is read while the block before is computed with.
#define X_OCTETS (qk_dim / 8u)
#define Y_OCTETS (v_dim / 8u)
#define X_AHEAD ((block * X_OCTETS + local_size - 1u) / local_size)
#define Y_AHEAD ((block * Y_OCTETS + local_size - 1u) / local_size)
uvec4 x_ahead[X_AHEAD], y_ahead[Y_AHEAD];

#define FETCH(ahead, from, first, octets)                                                          \
    [[unroll]] for (uint i_ = 0u; i_ < ahead.length(); ++i_) {                                     \
        uint item_ = min(gl_LocalInvocationIndex + i_ * local_size, block * octets - 1u);          \
        ahead[i_] = octet_of(from, first + item_ / octets, item_ % octets);                        \
    }
#define PUT(ahead, octets, start, stride)                                                          \
    [[unroll]] for (uint i_ = 0u; i_ < ahead.length(); ++i_) {                                     \
        uint item_ = gl_LocalInvocationIndex + i_ * local_size;                                    \
        if (item_ < block * octets) {                                                              \
            memory[start + item_ / octets * stride + item_ % octets] = codes_of(ahead[i_]);        \
        }                                                                                          \
    }

// The subgroup's rows, of dim / mma_k matrices.
#define LOAD_ROWS(a, from, first, dim, stride)                                                     \
    for (uint turn_ = 0u; turn_ < warps; turn_ += TURN) {                                          \
        barrier();                                                                                 \
        stage_rows(from, first + turn_ * mma_m, dim, stride);                                      \
        barrier();                                                                                 \
        if (gl_SubgroupID / TURN == turn_ / TURN) {                                                \
            [[unroll]] for (uint i_ = 0u; i_ < dim / mma_k; ++i_) {                                \
                coopMatLoad(a[i_], memory,                                                         \
                            gl_SubgroupID % TURN * mma_m * stride + i_ * mma_k / 8u, stride,       \
                            gl_CooperativeMatrixLayoutRowMajor);                                   \
            }                                                                                      \
        }                                                                                          \
    }

// The subgroup's rows times the transpose of the block's j-th matrix of columns.
#define SCORE(score, a, count, start, stride, j)                                                   \
    ACCUMULATOR score = ACCUMULATOR(0.0);                                                          \
    [[unroll]] for (uint i_ = 0u; i_ < count; ++i_) {                                              \
        MATRIX_B b_;                                                                               \
        coopMatLoad(b_, memory, start + (j) * mma_n * stride + i_ * mma_k / 8u, stride,            \
                    gl_CooperativeMatrixLayoutColumnMajor);                                        \
        score = coopMatMulAdd(a[i_], b_, score);                                                   \
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

MATRIX_A x[qk_dim / mma_k];
#if NEEDS_DP
MATRIX_A y[v_dim / mma_k];
#endif
ACCUMULATOR sums[SUM_DIM / mma_n];

// Weights of mma_k columns from c on, times what the sums go over.
void add_sums(MATRIX_A w, uint c) {
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        MATRIX_B b;
        coopMatLoad(b, memory, SUM_START + c * SUM_STRIDE + i * mma_n / 8u, SUM_STRIDE,
                    gl_CooperativeMatrixLayoutRowMajor);
        sums[i] = coopMatMulAdd(w, b, sums[i]);
    }
}

#include "attention_in_lane.glsl"
#include "attention_in_memory.glsl"

void begin_rows(uint first_of_warp, uint statistics) {
    if (in_lane != 0u) {
        begin_in_lane(first_of_warp, statistics);
    } else {
        begin_in_memory(first_of_warp, statistics);
    }
}

// Columns first .. first + block - 1.
void take_block(uint first) {
    if (in_lane != 0u) {
        take_in_lane(first);
    } else {
        take_in_memory(first);
    }
}

#if ROLE == 0
// Stores lse; what the row that an invocation stores is still to be multiplied by.
float finish_rows(uint first_of_warp, uint statistics) {
    return in_lane != 0u ? finish_in_lane(first_of_warp, statistics)
                         : finish_in_memory(first_of_warp, statistics);
}
#endif

void main() {
#if ROWS_ARE_QUERIES
    uint head = gl_WorkGroupID.y, kv_head = head / group;
#else
    uint kv_head = gl_WorkGroupID.y, head = kv_head * group; // the first of the group
    uint left = group;
#endif
    Head q = head_of(uvec2(push.operands.q), head, push.q_token, push.q_head);
    Head k = head_of(uvec2(push.operands.k), kv_head, push.k_token, push.k_head);
#if ROLE == 0
    Head v = head_of(uvec2(push.operands.v), kv_head, push.v_token, push.v_head);
#define X_ROWS q
#define X_BLOCK k
#define Y_BLOCK v
#elif ROLE == 1
    Head v = head_of(uvec2(push.operands.v), kv_head, push.v_token, push.v_head);
    Head grad_o =
        head_of(uvec2(push.operands.grad_o), head, push.grad_o_token, push.grad_o_head);
#define X_ROWS q
#define Y_ROWS grad_o
#define X_BLOCK k
#define Y_BLOCK v
#else
    Head grad_o =
        head_of(uvec2(push.operands.grad_o), head, push.grad_o_token, push.grad_o_head);
#if ROLE == 2
    Head v = head_of(uvec2(push.operands.v), kv_head, push.v_token, push.v_head);
#define Y_ROWS v
#endif
#define X_ROWS k
#define X_BLOCK q
#define Y_BLOCK grad_o
#endif

#if ROWS_ARE_QUERIES
#define FETCH_STATISTICS(first)
#else
#define COLUMNS_AHEAD ((block + local_size - 1u) / local_size)
    float lse_ahead[COLUMNS_AHEAD];
#if NEEDS_DP
    float delta_ahead[COLUMNS_AHEAD];
#define FETCH_DELTA(i, index) delta_ahead[i] = push.operands.delta.v[index];
#else
#define FETCH_DELTA(i, index)
#endif
#define FETCH_STATISTICS(first)                                                                    \
    [[unroll]] for (uint i_ = 0u; i_ < COLUMNS_AHEAD; ++i_) {                                      \
        uint column_ = min(gl_LocalInvocationIndex + i_ * local_size, block - 1u);                 \
        uint index_ = statistics + min(first + column_, last) * push.heads;                        \
        lse_ahead[i_] = push.operands.lse.v[index_] * kLog2E;                                      \
        FETCH_DELTA(i_, index_)                                                                    \
    }
#endif
#define FETCH_BLOCK(first)                                                                         \
    FETCH(x_ahead, X_BLOCK, first, X_OCTETS)                                                       \
    FETCH(y_ahead, Y_BLOCK, first, Y_OCTETS)                                                       \
    FETCH_STATISTICS(first)

    // Rows with more to sum start first.
#if ROWS_ARE_QUERIES
    uint first_row = (gl_NumWorkGroups.x - 1u - gl_WorkGroupID.x) * BLOCK_R;
#else
    uint first_row = gl_WorkGroupID.x * BLOCK_R;
#endif
    uint first_of_warp = first_row + gl_SubgroupID * mma_m;
    uint last = push.seq - 1u;
    uint statistics = gl_WorkGroupID.z * push.seq * push.heads + head;
    begin_rows(first_of_warp, statistics);

#if ROWS_ARE_QUERIES
    uint first = document_begin(token_of(first_row)) / block * block;
    uint end = min(push.seq, first_row + BLOCK_R), begin_of_warp = document_begin(token_of(first_of_warp));
#else
    uint first = first_row / block * block;
    uint end = document_end(token_of(first_row + BLOCK_R - 1u)),
         end_of_warp = document_end(token_of(first_of_warp + mma_m - 1u));
#endif
    FETCH_BLOCK(first)
    LOAD_ROWS(x, X_ROWS, first_row, qk_dim, X_STRIDE)
#if NEEDS_DP
    LOAD_ROWS(y, Y_ROWS, first_row, v_dim, Y_STRIDE)
#endif
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }

    do {
        barrier();
        PUT(x_ahead, X_OCTETS, 0u, X_STRIDE)
        PUT(y_ahead, Y_OCTETS, Y_START, Y_STRIDE)
#if !ROWS_ARE_QUERIES
        [[unroll]] for (uint i = 0u; i < COLUMNS_AHEAD; ++i) {
            uint c = gl_LocalInvocationIndex + i * local_size;
            if (c < block) {
                memory[STATISTICS_START + c / 4u][c % 4u] = floatBitsToUint(lse_ahead[i]);
#if NEEDS_DP
                memory[STATISTICS_START + (block + c) / 4u][c % 4u] =
                    floatBitsToUint(delta_ahead[i]);
#endif
            }
        }
#endif
        barrier();
        uint next = first + block;
#if !ROWS_ARE_QUERIES
        if (next >= end && left > 1u) { // on to the next head of the group
            q.base = address_add(q.base, 1u, push.q_head, 1u);
            grad_o.base = address_add(grad_o.base, 1u, push.grad_o_head, 1u);
            ++statistics;
            --left;
            next = first_row / block * block;
        }
#endif
        if (next < end) {
            FETCH_BLOCK(next)
        }
        // A subgroup leaves out what none of its rows sees. What is of other documents it only leaves
        // out in lanes: see subgroup_shared_barrier().
#if ROWS_ARE_QUERIES
        bool seen = first < first_of_warp + mma_m &&
                    (in_lane == 0u || first + block > begin_of_warp);
#else
        bool seen = first + block > first_of_warp && (in_lane == 0u || first < end_of_warp);
#endif
        if (seen) {
            take_block(first);
        }
        first = next;
    } while (first < end);

    float factor = 1.0;
#if ROLE == 0
    Head result = head_of(uvec2(push.operands.o), head, push.o_token, push.o_head);
    factor = finish_rows(first_of_warp, statistics);
#elif ROLE == 1
    Head result = head_of(uvec2(push.operands.grad_q), head, push.grad_q_token, push.grad_q_head);
    factor = push.scale;
#elif ROLE == 2
    Head result =
        head_of(uvec2(push.operands.grad_k), kv_head, push.grad_k_token, push.grad_k_head);
    factor = push.scale;
#else
    Head result =
        head_of(uvec2(push.operands.grad_v), kv_head, push.grad_v_token, push.grad_v_head);
#endif
    barrier(); // nobody reads the block any more
    uint result_start = gl_SubgroupID * RESULT_PART;
    uint in_matrix = gl_SubgroupInvocationID / LANES_PER_ROW, row = first_of_warp + in_matrix;
    [[unroll]] for (uint i = 0u; i < SUM_DIM / mma_n; ++i) {
        subgroup_shared_barrier();
        coopMatStore(sums[i], memory, result_start, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_shared_barrier();
        if (row <= last) {
            for (uint octet = gl_SubgroupInvocationID % LANES_PER_ROW; octet < mma_n / 8u;
                 octet += LANES_PER_ROW) {
                uint at = result_start + in_matrix * (mma_n / 4u) + 2u * octet;
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
