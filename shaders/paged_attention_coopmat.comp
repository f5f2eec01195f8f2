// SPDX-License-Identifier: MIT
// Attention over a paged cache on matrix units, for queries of bf16 and entries of bf16 or FP8.
// Operands and tasks: include/paged_attention.glsl; weights are rounded to the matrix type, sums are
// f32. A workgroup has warps / parts bands of mma_m pairs, which share what it reads of the cache:
// `block` entries at a time. The `parts` subgroups of a band have a part of a key's and of a value's
// columns each: scores are the sums of their parts, in the order of the parts.
//
// Variants   bf16, f16: the elements of matrices. As f16 operands are exact within 2^-14 .. 65504 only.
// Constants  local_size  subgroup size * warps
//            mma_m, mma_n, mma_k  a row that the device enumerates (subgroup scope, f32 sums), all
//                        multiples of 8
//            warps, parts  subgroups, and how many share a band; of FP8 as many as scales of an entry
//            block       entries at a time: divides kCacheBlock, a multiple of mma_n and mma_k; with
//                        2 or more of them to each invocation of a band's row
//            ahead       1: the next entries are read while these are computed with
//            in_lane     1: weights stay in the invocations that hold their scores, as lane_* says
//                        (MatrixSlots, matrix_images.hpp), where parts is 1 and entries are bf16;
//                        0: they pass through workgroup memory
// Codes of FP8 are exact as matrix elements, in which each four of their columns stands as 0, 2, 1, 3.
// Their scales are multiplied with a part's scores, and
// with the weights before those are rounded.
// Dispatch: any number of workgroups.
// Shared memory: bellows::ops::PagedMatrixTile counts `memory` below.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/coopmat.glsl"
#extension GL_KHR_shader_subgroup_shuffle : require
#if MATRIX_BF16
#extension GL_EXT_shader_explicit_arithmetic_types_int16 : require
#endif

#include "include/activation.glsl"
#include "include/matrix_slots.glsl"
#include "include/matrix_type.glsl"
#include "paged_attention_coopmat.kernel.glsl"
#include "include/paged_attention.glsl"

layout(local_size_x_id = 0) in;

const bool kLatent = first_value4 == 0u, kCodes = storage == kStoredFp8;
// Of a weight times a scale: f16 would lose what is below 2^-24 of it.
#if MATRIX_BF16
const float kLift = 1.0;
#else
const float kLift = kCodes ? 512.0 : 1.0;
#endif

#define LANES (local_size / warps)
#define KEY (4u * key4)
#define VALUE (4u * value4)
#define FIRST_K ((kLatent ? VALUE : KEY) / parts)         // columns of a subgroup's part of a key,
#define SECOND_K ((kLatent ? KEY - VALUE : 0u) / parts)   // and those that have no scale
#define SUMS (VALUE / parts / mma_n)                      // matrices

// Eight elements of the matrix type to a uvec4, or four floats. Rows are padded against bank
// conflicts. Weights take the place of the scores of which they come.
#define X_STRIDE ((KEY + 8u) / 8u)
#define Y_STRIDE (kLatent ? X_STRIDE : (VALUE + 8u) / 8u)
#define Y_START (kLatent ? 0u : block * X_STRIDE)
#define SCALES_START (block * X_STRIDE + (kLatent ? 0u : block * Y_STRIDE))
#define SCORES_START (SCALES_START + (kCodes ? parts * block / 4u : 0u))
#define S_STRIDE ((block + 4u) / 4u)
#define S_PART (mma_m * S_STRIDE)
#define FADES_START (SCORES_START + warps * S_PART)
#define RESULT_PART (mma_m * mma_n / 4u)
#define RESULT_START (in_lane != 0u ? 0u : SCORES_START)
#define MEMORY (in_lane != 0u ? SCORES_START : FADES_START + warps / parts * mma_m / 4u)
#define RESULTS (RESULT_START + warps * RESULT_PART)
shared uvec4 memory[MEMORY > RESULTS ? MEMORY : RESULTS];

#define MATRIX_A coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_m, mma_k, gl_MatrixUseA>
#define MATRIX_B coopmat<MATRIX_TYPE, gl_ScopeSubgroup, mma_k, mma_n, gl_MatrixUseB>
#define ACCUMULATOR coopmat<float, gl_ScopeSubgroup, mma_m, mma_n, gl_MatrixUseAccumulator>

MATRIX_A x[(FIRST_K + SECOND_K) / mma_k];
ACCUMULATOR sums[SUMS];

uint band() {
    return gl_SubgroupID / parts;
}
uint part() {
    return gl_SubgroupID % parts;
}

#include "include/paged_block.glsl"

// ---- The queries of a task

#define TURN (SCALES_START / (mma_m * X_STRIDE)) // bands whose queries pass through memory at a time

void load_queries(Item item, uint kv_head, uint first_pair, uint present) {
    for (uint turn = 0u; turn < warps / parts; turn += TURN) {
        barrier();
        for (uint i = gl_LocalInvocationIndex; i < TURN * mma_m * (KEY / 8u); i += local_size) {
            uint pair = first_pair + min(turn * mma_m + i / (KEY / 8u), present - 1u);
            uint at = (item.row + pair / group) * push.q_row4 +
                      (kv_head * group + pair % group) * push.q_head4 + i % (KEY / 8u) * 2u;
            uvec2 low = push.operands.q.v[at], high = push.operands.q.v[at + 1u];
            if (kCodes && i % (KEY / 8u) < VALUE / 8u) {
                low = in_order_of_codes(low);
                high = in_order_of_codes(high);
            }
            memory[i / (KEY / 8u) * X_STRIDE + i % (KEY / 8u)] = codes_of(uvec4(low, high));
        }
        barrier();
        if (band() / TURN == turn / TURN) {
            uint from = band() % TURN * mma_m * X_STRIDE;
            [[unroll]] for (uint i = 0u; i < FIRST_K / mma_k; ++i) {
                coopMatLoad(x[i], memory, from + (part() * FIRST_K + i * mma_k) / 8u, X_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
            }
            [[unroll]] for (uint i = 0u; i < SECOND_K / mma_k; ++i) {
                coopMatLoad(x[FIRST_K / mma_k + i], memory,
                            from + (VALUE + part() * SECOND_K + i * mma_k) / 8u, X_STRIDE,
                            gl_CooperativeMatrixLayoutRowMajor);
            }
        }
    }
}

// ---- A block of keys and values

// The subgroup's part of the scores of its band and the j-th matrix of entries.
#define SCORE(score, j)                                                                            \
    ACCUMULATOR score = ACCUMULATOR(0.0);                                                          \
    [[unroll]] for (uint i_ = 0u; i_ < FIRST_K / mma_k; ++i_) {                                    \
        MATRIX_B b_;                                                                               \
        coopMatLoad(b_, memory, (j) * mma_n * X_STRIDE + (part() * FIRST_K + i_ * mma_k) / 8u,     \
                    X_STRIDE, gl_CooperativeMatrixLayoutColumnMajor);                              \
        score = coopMatMulAdd(x[i_], b_, score);                                                   \
    }                                                                                              \
    if (kCodes) { /* scales of the columns, all rows alike */                                      \
        ACCUMULATOR scales_;                                                                       \
        coopMatLoad(scales_, memory, SCALES_START + (part() * block + (j) * mma_n) / 4u, 0u,       \
                    gl_CooperativeMatrixLayoutRowMajor);                                           \
        score *= scales_;                                                                          \
    }                                                                                              \
    [[unroll]] for (uint i_ = 0u; i_ < SECOND_K / mma_k; ++i_) {                                   \
        MATRIX_B b_;                                                                               \
        coopMatLoad(b_, memory,                                                                    \
                    (j) * mma_n * X_STRIDE + (VALUE + part() * SECOND_K + i_ * mma_k) / 8u,        \
                    X_STRIDE, gl_CooperativeMatrixLayoutColumnMajor);                              \
        score = coopMatMulAdd(x[FIRST_K / mma_k + i_], b_, score);                                 \
    }

// Weights of mma_k entries from c on, times the subgroup's part of their values.
void add_sums(MATRIX_A weights, uint c) {
    [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
        MATRIX_B b;
        coopMatLoad(b, memory, Y_START + c * Y_STRIDE + (part() * (VALUE / parts) + i * mma_n) / 8u,
                    Y_STRIDE, gl_CooperativeMatrixLayoutRowMajor);
        sums[i] = coopMatMulAdd(weights, b, sums[i]);
    }
}

bool sees_some(Item item, uint pair) {
    return item.keys + pair / group > item.first_block * kCacheBlock;
}

void store_lse_of(Item item, uint kv_head, uint pair, float log_sum) {
    uint row = pair / group, head = kv_head * group + pair % group;
    store_lse(item, target_of(item, row, head), row, head, log_sum);
}

#include "include/paged_in_lane.glsl"
#include "include/paged_in_memory.glsl"

// ---- Results

void store_sums(Item item, uint kv_head, uint first_pair, uint present) {
    uint from = RESULT_START + gl_SubgroupID * RESULT_PART;
    [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
        subgroup_shared_barrier();
        coopMatStore(sums[i], memory, from, mma_n / 4u, gl_CooperativeMatrixLayoutRowMajor);
        subgroup_shared_barrier();
        [[unroll]] for (uint first = 0u; first < RESULT_PART; first += LANES) {
            uint quad = first + gl_SubgroupInvocationID;
            uint at = band() * mma_m + quad / (mma_n / 4u);
            if (quad < RESULT_PART && at < present && sees_some(item, first_pair + at)) {
                uint row = (first_pair + at) / group;
                uint head = kv_head * group + (first_pair + at) % group;
                uint column = part() * (VALUE / parts) + i * mma_n + quad % (mma_n / 4u) * 4u;
                vec4 sum = uintBitsToFloat(memory[from + quad]);
                if (in_lane == 0u) {
                    sum *= uintBitsToFloat(memory[FADES_START + at / 4u][at % 4u]);
                }
                store_result(target_of(item, row, head), column / 4u, kCodes ? sum.xzyw : sum);
            }
        }
    }
    barrier();
}

void attend(Item item, uint kv_head, uint first_pair, uint present) {
    uint first = item.first_block * kCacheBlock;
    uint end = min(keys_of(item), item.end_block * kCacheBlock);
    bool busy = band() * mma_m < present;
    if (in_lane != 0u) {
        begin_in_lane(item, first_pair, present);
    } else {
        begin_in_memory(item, first_pair, present);
    }
    load_queries(item, kv_head, first_pair, present);
    [[unroll]] for (uint i = 0u; i < SUMS; ++i) {
        sums[i] = ACCUMULATOR(0.0);
    }
    if (first < end) {
        fetch(item, kv_head, first, end);
        do { // a test at the loop's head would read once more than it should: common.glsl
            barrier();
            put(first, end);
            barrier();
            uint next = first + block;
            if (ahead != 0u && next < end) {
                fetch(item, kv_head, next, end);
            }
            if (in_lane == 0u) {
                take_in_memory(first, busy);
            } else if (busy) {
                take_in_lane(first);
            }
            if (ahead == 0u && next < end) {
                fetch(item, kv_head, next, end);
            }
            first = next;
        } while (first < end);
    }
    barrier();
    if (in_lane != 0u) {
        finish_in_lane(item, kv_head, first_pair, present);
    } else {
        finish_in_memory(item, kv_head, first_pair, present);
    }
    barrier();
    store_sums(item, kv_head, first_pair, present);
}

void main() {
    uint tasks = num_tasks();
    FOR_COUNTED(task, gl_WorkGroupID.x, tasks) {
        Item item = load_item(task / (kv_heads * chunks));
        uint all_pairs = item.rows * group, pairs = warps / parts * mma_m;
        FOR_COUNTED(first_pair, task % chunks * pairs, all_pairs) {
            attend(item, task / chunks % kv_heads, first_pair, min(all_pairs - first_pair, pairs));
        } NEXT_COUNTED(first_pair, all_pairs, chunks * pairs);
    } NEXT_COUNTED(task, tasks, gl_NumWorkGroups.x);
}
