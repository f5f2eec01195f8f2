// SPDX-License-Identifier: MIT
// Attention over a paged cache, a workgroup to `pairs` pairs, which share what it reads of the cache:
// `tile` entries at a time, as f32 in workgroup memory. Operands: include/paged_attention.glsl.
// Scores: eight neighbouring invocations share the columns of kPairs x kTokens products and add up
// their parts by shuffles. Values: an invocation holds its column of four, and every `columns`th
// further one, of every local_size / columns-th pair.
// Constants  local_size, pairs, tile, columns: powers of two; columns <= local_size <= pairs * columns
// Dispatch: any number of workgroups.
// Shared memory: 16 * tile * (key4, of heads also + value4) + 4 * pairs * (tile + 3) bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_shuffle : require
#include "include/activation.glsl"
#include "paged_attention.kernel.glsl"
#include "include/paged_attention.glsl"

layout(local_size_x_id = 0) in;

const uint kPairs = 2u, kTokens = 4u; // of a product's invocation
const uint kLanes = 8u;               // that share it
const uint kOwnPairs = pairs * columns / local_size;
const uint kOwnColumns = (value4 + columns - 1u) / columns;
const bool kLatent = first_value4 == 0u;
const uint kEntry4 = kLatent ? key4 : key4 + value4;

shared vec4 entries[tile * kEntry4];
shared float weights[tile * pairs]; // of scores, too
shared float tops[pairs], totals[pairs], fades[pairs];

vec4 sums[kOwnPairs * kOwnColumns];

// Entries first .. first + count of a block; what follows up to a whole tile as zeros.
void load_tile(uvec2 block, uint first, uint count, uint kv_head) {
    for (uint i = gl_LocalInvocationIndex; i < tile * kEntry4; i += local_size) {
        uint token = i / kEntry4, at = i % kEntry4;
        uint from = at < key4 ? kv_head * key4 + at
                              : first_value4 + kv_head * value4 + (at - key4);
        entries[i] = token < count ? load_entry(entry_address(block, first + token), from)
                                   : vec4(0.0);
    }
}

uint query_at(Item item, uint kv_head, uint pair) {
    return (item.row + pair / group) * push.q_row4 +
           (kv_head * group + pair % group) * push.q_head4;
}

// Scores of the tile for `present` pairs from first_pair on.
void score_tile(Item item, uint kv_head, uint first_pair, uint present) {
    float scale = push.scale * kLog2E; // powers of two: exp2 needs no multiplication
    uint lane = gl_LocalInvocationIndex % kLanes;
    uint pair_tiles = div_up(present, kPairs);
    for (uint i = gl_LocalInvocationIndex / kLanes; i < pair_tiles * (tile / kTokens);
         i += local_size / kLanes) {
        uint pair = i % pair_tiles * kPairs, token = i / pair_tiles * kTokens;
        uint q_at[kPairs];
        float dots[kPairs * kTokens];
        [[unroll]] for (uint p = 0u; p < kPairs; ++p) {
            q_at[p] = query_at(item, kv_head, first_pair + min(pair + p, present - 1u));
        }
        [[unroll]] for (uint k = 0u; k < kPairs * kTokens; ++k) {
            dots[k] = 0.0;
        }
        for (uint d = lane; d < key4; d += kLanes) {
            vec4 x[kPairs];
            [[unroll]] for (uint p = 0u; p < kPairs; ++p) {
                x[p] = load4(push.operands.q.v[q_at[p] + d]);
            }
            [[unroll]] for (uint t = 0u; t < kTokens; ++t) {
                vec4 key = entries[(token + t) * kEntry4 + d];
                [[unroll]] for (uint p = 0u; p < kPairs; ++p) {
                    [[unroll]] for (uint e = 0u; e < 4u; ++e) {
                        dots[t * kPairs + p] = fma(key[e], x[p][e], dots[t * kPairs + p]);
                    }
                }
            }
        }
        [[unroll]] for (uint k = 0u; k < kPairs * kTokens; ++k) {
            [[unroll]] for (uint reach = 1u; reach < kLanes; reach *= 2u) {
                dots[k] += subgroupShuffleXor(dots[k], reach);
            }
            if (k % kLanes == lane) {
                weights[(token + k / kPairs) * pairs + pair + k % kPairs] = dots[k] * scale;
            }
        }
    }
}

// Scores become weights, by an invocation to each pair: before it, tops and totals are those of the
// tiles before.
void weigh_tile(Item item, uint first_pair, uint present, uint first_key) {
    uint pair = gl_LocalInvocationIndex;
    if (pair < present) {
        uint keys = item.keys + (first_pair + pair) / group;
        uint seen = min(max(keys, first_key) - first_key, tile);
        float top = tops[pair];
        for (uint t = 0u; t < seen; ++t) {
            top = max(top, weights[t * pairs + pair]);
        }
        float fading = fade(tops[pair], top), total = totals[pair] * fading;
        for (uint t = 0u; t < seen; ++t) {
            float weight = exp2(weights[t * pairs + pair] - top);
            weights[t * pairs + pair] = weight;
            total += weight;
        }
        tops[pair] = top;
        totals[pair] = total;
        fades[pair] = fading;
    }
}

#define OWN_PAIR(i) ((i) * (local_size / columns) + gl_LocalInvocationIndex / columns)
#define OWN_COLUMN(c) (gl_LocalInvocationIndex % columns + (c) * columns)

#define ADD_TOKEN(t, sees)                                                                         \
    vec4 value[kOwnColumns];                                                                       \
    [[unroll]] for (uint c = 0u; c < kOwnColumns; ++c) {                                           \
        uint at = min(OWN_COLUMN(c), value4 - 1u);                                                 \
        value[c] = entries[(t) * kEntry4 + (kLatent ? at : key4 + at)];                            \
    }                                                                                              \
    [[unroll]] for (uint i = 0u; i < kOwnPairs; ++i) {                                             \
        if (OWN_PAIR(i) < present) {                                                                \
            float weight = weights[(t) * pairs + OWN_PAIR(i)];                                     \
            [[unroll]] for (uint c = 0u; c < kOwnColumns; ++c) {                                   \
                vec4 sum = fma(value[c], vec4(weight), sums[i * kOwnColumns + c]);                 \
                sums[i * kOwnColumns + c] = sees ? sum : sums[i * kOwnColumns + c];                \
            }                                                                                      \
        }                                                                                          \
    }

void add_tile(Item item, uint first_pair, uint present, uint first_key) {
    [[unroll]] for (uint i = 0u; i < kOwnPairs; ++i) {
        if (OWN_PAIR(i) < present) {
            float fading = fades[OWN_PAIR(i)];
            [[unroll]] for (uint c = 0u; c < kOwnColumns; ++c) {
                sums[i * kOwnColumns + c] *= fading;
            }
        }
    }
    if (first_key + tile <= item.keys) {
        for (uint t = 0u; t < tile; ++t) {
            ADD_TOKEN(t, true)
        }
    } else {
        for (uint t = 0u; t < tile; ++t) {
            ADD_TOKEN(t, first_key + t < item.keys + (first_pair + OWN_PAIR(i)) / group)
        }
    }
}

void store_pairs(Item item, uint kv_head, uint first_pair, uint present) {
    [[unroll]] for (uint i = 0u; i < kOwnPairs; ++i) {
        uint pair = OWN_PAIR(i);
        uint row = (first_pair + pair) / group;
        if (pair < present && item.keys + row > item.first_block * kCacheBlock) {
            uint head = kv_head * group + (first_pair + pair) % group;
            Target target = target_of(item, row, head);
            float inverse = 1.0 / totals[pair];
            [[unroll]] for (uint c = 0u; c < kOwnColumns; ++c) {
                if (OWN_COLUMN(c) < value4) {
                    store_result(target, OWN_COLUMN(c), sums[i * kOwnColumns + c] * inverse);
                }
            }
            if (OWN_COLUMN(0u) == 0u) {
                store_lse(item, target, row, head, tops[pair] + log2(totals[pair]));
            }
        }
    }
}

void attend(Item item, uint kv_head, uint first_pair, uint present) {
    if (gl_LocalInvocationIndex < pairs) {
        tops[gl_LocalInvocationIndex] = kLowest;
        totals[gl_LocalInvocationIndex] = 0.0;
    }
    [[unroll]] for (uint i = 0u; i < kOwnPairs * kOwnColumns; ++i) {
        sums[i] = vec4(0.0);
    }
    uint end = min(keys_of(item), item.end_block * kCacheBlock);
    FOR_COUNTED(first, item.first_block * kCacheBlock, end) {
        uvec2 block = block_address(item, first / kCacheBlock);
        load_tile(block, first % kCacheBlock, min(end - first, tile), kv_head);
        barrier();
        score_tile(item, kv_head, first_pair, present);
        barrier();
        weigh_tile(item, first_pair, present, first);
        barrier();
        add_tile(item, first_pair, present, first);
        barrier();
    } NEXT_COUNTED(first, end, tile);
    store_pairs(item, kv_head, first_pair, present);
    barrier();
}

void main() {
    uint tasks = num_tasks();
    FOR_COUNTED(task, gl_WorkGroupID.x, tasks) {
        Item item = load_item(task / (kv_heads * chunks));
        uint all_pairs = item.rows * group;
        FOR_COUNTED(first_pair, task % chunks * pairs, all_pairs) {
            attend(item, task / chunks % kv_heads, first_pair, min(all_pairs - first_pair, pairs));
        } NEXT_COUNTED(first_pair, all_pairs, chunks * pairs);
    } NEXT_COUNTED(task, tasks, gl_NumWorkGroups.x);
}
