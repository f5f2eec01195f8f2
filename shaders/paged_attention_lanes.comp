// SPDX-License-Identifier: MIT
// Attention over a paged cache, an invocation to each pair: the keys' addresses are the same for a
// workgroup, which CPU drivers load once. Operands: include/paged_attention.glsl.
// A block's scores are computed first, then its values are added to kPart4 fours of columns at a
// time. No barrier.
// Dispatch: any number of workgroups. Shared memory: 16 * local_size * (value4 + 16) bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "paged_attention_lanes.kernel.glsl"
#include "include/paged_attention.glsl"

layout(local_size_x_id = 0) in;

const uint kStep = 8u; // keys at once
// What is unrolled takes long to compile, decoding most.
const uint kMostPart4 = storage == kStoredFp8 ? 2u : 4u;
const uint kPart4 = value4 < kMostPart4 ? value4 : kMostPart4;

// Each invocation has its own; arrays of it that are indexed by what is not constant would take CPU
// drivers' compilers minutes.
shared float scores[kCacheBlock * local_size];
shared vec4 sums[value4 * local_size];

#define SCORE(key) scores[(key) * local_size + gl_LocalInvocationIndex]
#define SUM(column4) sums[(column4) * local_size + gl_LocalInvocationIndex]

// Scores of the block's first `count` keys, of which the invocation sees `seen`; returns the largest
// of them and `top`.
float score_block(uvec2 block, uint count, uint seen, uint q_at, uint key_at, float top) {
    float scale = push.scale * kLog2E; // powers of two: exp2 needs no multiplication
    FOR_COUNTED(first, 0u, count) {
        float dots[kStep];
        uvec2 entries[kStep];
        [[unroll]] for (uint b = 0u; b < kStep; ++b) {
            dots[b] = 0.0;
            entries[b] = entry_address(block, min(first + b, count - 1u));
        }
        FOR_COUNTED(d, 0u, key4) {
            vec4 x = load4(push.operands.q.v[q_at + d]);
            [[unroll]] for (uint b = 0u; b < kStep; ++b) {
                vec4 key = load_entry(entries[b], key_at + d);
                [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                    dots[b] = fma(key[e], x[e], dots[b]);
                }
            }
        } NEXT_COUNTED(d, key4, 1u);
        [[unroll]] for (uint b = 0u; b < kStep; ++b) {
            float score = dots[b] * scale;
            SCORE(first + b) = score;
            top = first + b < seen ? max(top, score) : top;
        }
    } NEXT_COUNTED(first, count, kStep);
    return top;
}

// Scores become weights; returns their sum behind `total`.
float weigh_block(uint count, uint seen, float top, float total) {
    FOR_COUNTED(first, 0u, count) {
        [[unroll]] for (uint b = 0u; b < kStep; ++b) {
            float weight = first + b < seen ? exp2(SCORE(first + b) - top) : 0.0;
            SCORE(first + b) = weight;
            total += weight;
        }
    } NEXT_COUNTED(first, count, kStep);
    return total;
}

#define ADD_VALUES(sees)                                                                           \
    FOR_COUNTED(first, 0u, count) {                                                                \
        float weights[kStep];                                                                      \
        uvec2 entries[kStep];                                                                      \
        [[unroll]] for (uint b = 0u; b < kStep; ++b) {                                             \
            weights[b] = SCORE(first + b);                                                         \
            entries[b] = entry_address(block, min(first + b, count - 1u));                         \
        }                                                                                          \
        [[unroll]] for (uint i = 0u; i < kPart4; ++i) {                                            \
            uint column4 = value_at + min(part + i, value4 - 1u);                                  \
            [[unroll]] for (uint b = 0u; b < kStep; ++b) {                                         \
                vec4 sum = fma(load_first_part(entries[b], column4), vec4(weights[b]),                 \
                               of_part[i]);                                                        \
                of_part[i] = sees ? sum : of_part[i];                                              \
            }                                                                                      \
        }                                                                                          \
    } NEXT_COUNTED(first, count, kStep);

void add_block(uvec2 block, uint count, uint seen, bool all_see, uint value_at, float correction) {
    FOR_COUNTED(part, 0u, value4) {
        vec4 of_part[kPart4];
        [[unroll]] for (uint i = 0u; i < kPart4; ++i) {
            of_part[i] = SUM(min(part + i, value4 - 1u)) * correction;
        }
        if (all_see) {
            ADD_VALUES(true)
        } else {
            ADD_VALUES(first + b < seen)
        }
        [[unroll]] for (uint i = 0u; i < kPart4; ++i) {
            if (part + i < value4) {
                SUM(part + i) = of_part[i];
            }
        }
    } NEXT_COUNTED(part, value4, kPart4);
}

void attend(Item item, uint kv_head, uint first_pair) {
    uint pairs = item.rows * group;
    uint pair = min(first_pair + gl_LocalInvocationIndex, pairs - 1u);
    uint row = pair / group, head = kv_head * group + pair % group;
    uint q_at = (item.row + row) * push.q_row4 + head * push.q_head4;
    uint keys = item.keys + row, all_keys = keys_of(item);
    float top = kLowest, total = 0.0;
    for (uint i = 0u; i < value4; ++i) {
        SUM(i) = vec4(0.0);
    }
    FOR_COUNTED(block, item.first_block, item.end_block) {
        uvec2 address = block_address(item, block);
        uint first = block * kCacheBlock;
        uint count = min(all_keys - first, kCacheBlock);
        uint seen = max(keys, first) - first;
        float new_top = score_block(address, count, seen, q_at, kv_head * key4, top);
        float correction = fade(top, new_top);
        total = weigh_block(count, seen, new_top, total * correction);
        add_block(address, count, seen, first + kCacheBlock <= item.keys,
                  first_value4 + kv_head * value4, correction);
        top = new_top;
    } NEXT_COUNTED(block, item.end_block, 1u);
    if (first_pair + gl_LocalInvocationIndex < pairs && keys > item.first_block * kCacheBlock) {
        Target target = target_of(item, row, head);
        float inverse = 1.0 / total;
        for (uint i = 0u; i < value4; ++i) {
            store_result(target, i, SUM(i) * inverse);
        }
        store_lse(item, target, row, head, top + log2(total));
    }
}

void main() {
    uint tasks = num_tasks();
    FOR_COUNTED(task, gl_WorkGroupID.x, tasks) {
        Item item = load_item(task / (kv_heads * chunks));
        uint pairs = item.rows * group;
        FOR_COUNTED(first_pair, task % chunks * local_size, pairs) {
            attend(item, task / chunks % kv_heads, first_pair);
        } NEXT_COUNTED(first_pair, pairs, chunks * local_size);
    } NEXT_COUNTED(task, tasks, gl_NumWorkGroups.x);
}
