// SPDX-License-Identifier: MIT
// Router of one token: scores s = sigmoid(logits) or softmax(logits); the top_k experts by s + bias
// (the bias takes part in the selection only), drawn from the group_top_k best of `groups` equal
// groups when groups > 1, where a group counts by the sum of its group_score_top best s + bias;
// weights w = s[expert] (/ sum of the chosen s) * route_scale. Equal values: the lower index first.
//   logits, scores [tokens, experts] f32, bias [experts] f32
//   topk_ids [tokens, top_k] i32 in descending order of s + bias, topk_weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a token. At most 32 groups and a top_k of 64; one workgroup
// per token needs local_size >= 32 and shared_experts >= experts, one invocation per token
// shared_experts = 1. A workgroup counts for each expert how many stand before it: that takes one
// barrier, where choosing one after another takes several for each.
// Shared memory: 4 * (2 * shared_experts + local_size + 128) bytes in the first form.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_forward.kernel.glsl"
#include "include/rows.glsl"

#define kLowest uintBitsToFloat(0xFF800000u)
const uint kMaxGroups = 32u, kMaxTopK = 64u;

// A workgroup's token; one invocation per token keeps its scores in memory and its groups here:
shared float shared_scores[shared_experts];
shared float shared_group_scores[kMaxGroups];
shared uint shared_selected[kMaxGroups];
// Of experts that may be chosen, as numbers of the same order, never 0; of the others 0.
const uint kKeyFours = (shared_experts + 3u) / 4u;
shared uvec4 shared_keys[kKeyFours];
shared uint shared_chosen[kMaxTopK];
float own_group_scores[kMaxGroups];

void row_barrier() {
    if (row_per_workgroup != 0u) {
        barrier();
    }
}

// What becomes a score, where this invocation finds it again.
void note(uint row, uint expert, float value) {
    if (row_per_workgroup != 0u) {
        shared_scores[expert] = value;
    } else {
        push.operands.scores.v[row + expert] = value;
    }
}

void keep_score(uint row, uint expert, float score) {
    note(row, expert, score);
    if (row_per_workgroup != 0u) {
        push.operands.scores.v[row + expert] = score;
    }
}

float kept_score(uint row, uint expert) {
    if (row_per_workgroup != 0u) {
        return shared_scores[expert];
    }
    return push.operands.scores.v[row + expert];
}

// Above every NaN stands every number.
float selection_score(uint row, uint expert) {
    float score = kept_score(row, expert);
    if (push.has_bias != 0u) {
        score += push.operands.bias.v[expert];
    }
    return is_nan(score) ? kLowest : score;
}

void write_scores(uint row) {
    if (push.use_softmax == 0u) {
        FOR_COLUMNS(e, push.experts) {
            keep_score(row, e, sigmoid(push.operands.logits.v[row + e]));
        } NEXT_COLUMN(e, push.experts);
    } else {
        float most = kLowest;
        FOR_COLUMNS(e, push.experts) {
            float logit = push.operands.logits.v[row + e];
            note(row, e, logit);
            most = max(most, logit);
        } NEXT_COLUMN(e, push.experts);
        most = row_max(most);
        float sum = 0.0;
        FOR_COLUMNS(e, push.experts) {
            float power = exp_f32(kept_score(row, e) - most);
            note(row, e, power);
            sum += power;
        } NEXT_COLUMN(e, push.experts);
        sum = row_sum(sum);
        FOR_COLUMNS(e, push.experts) {
            keep_score(row, e, kept_score(row, e) / sum);
        } NEXT_COLUMN(e, push.experts);
    }
    row_barrier();
}

float score_group(uint row, uint group, uint size) {
    float first = kLowest;
    float second = kLowest;
    uint end = (group + 1u) * size;
    FOR_COUNTED(e, group * size, end) {
        float score = selection_score(row, e);
        second = score > first ? first : max(second, score);
        first = max(first, score);
    } NEXT_COUNTED(e, end, 1u);
    return push.group_score_top > 1u && size > 1u ? first + second : first;
}

float group_score(uint group) {
    return row_per_workgroup != 0u ? shared_group_scores[group] : own_group_scores[group];
}

bool group_is_selected(uint group) {
    uint rank = 0u;
    for (uint h = 0u; h < push.groups; ++h) {
        bool before = group_score(h) > group_score(group) ||
                      (group_score(h) == group_score(group) && h < group);
        rank += before ? 1u : 0u;
    }
    return rank < push.group_top_k;
}

// Bit g set: group g may be drawn from.
uint select_groups(uint row) {
    if (push.groups <= 1u) {
        return 1u;
    }
    uint size = push.experts / push.groups;
    FOR_COLUMNS(g, push.groups) {
        float score = score_group(row, g, size);
        if (row_per_workgroup != 0u) {
            shared_group_scores[g] = score;
        } else {
            own_group_scores[g] = score;
        }
    } NEXT_COLUMN(g, push.groups);
    row_barrier();
    uint selected = 0u;
    FOR_COLUMNS(g, push.groups) {
        selected |= group_is_selected(g) ? 1u << g : 0u;
    } NEXT_COLUMN(g, push.groups);
    if (row_per_workgroup != 0u) {
        if (gl_LocalInvocationIndex < kMaxGroups) {
            shared_selected[gl_LocalInvocationIndex] = selected;
        }
        barrier();
        for (uint g = 0u; g < push.groups; ++g) {
            selected |= shared_selected[g];
        }
    }
    return selected;
}

// A number that is larger where the score is; equal scores have equal numbers.
uint key_of(float score) {
    uint bits = score == 0.0 ? 0u : floatBitsToUint(score);
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// How many of four keys stand before `key` of expert e; the first of them is that of expert `first`.
uint count_before(uvec4 keys, uint first, uint key, uint e) {
    uvec4 at = uvec4(first, first + 1u, first + 2u, first + 3u);
    uvec4 before = uvec4(greaterThan(keys, uvec4(key))) |
                   (uvec4(equal(keys, uvec4(key))) & uvec4(lessThan(at, uvec4(e))));
    return before.x + before.y + before.z + before.w;
}

// Writes the ids of a workgroup's token; returns the sum of the chosen scores.
float rank_experts(uint token, uint row, uint selected_groups) {
    uint size = push.experts / max(push.groups, 1u);
    for (uint e = gl_LocalInvocationIndex; e < 4u * kKeyFours; e += local_size) {
        uint key = 0u;
        if (e < push.experts && (selected_groups >> e / size & 1u) != 0u) {
            key = key_of(selection_score(row, e));
        }
        shared_keys[e / 4u][e % 4u] = key;
    }
    barrier();
    for (uint e = gl_LocalInvocationIndex; e < push.experts; e += local_size) {
        uint key = shared_keys[e / 4u][e % 4u], rank = 0u;
        for (uint i = 0u; i < kKeyFours; ++i) {
            rank += count_before(shared_keys[i], 4u * i, key, e);
        }
        if (key != 0u && rank < push.top_k) {
            shared_chosen[rank] = e;
            push.operands.topk_ids.v[token * push.top_k + rank] = int(e);
        }
    }
    barrier();
    float sum = 0.0;
    for (uint k = 0u; k < push.top_k; ++k) {
        sum += shared_scores[shared_chosen[k]];
    }
    return sum;
}

// The same of an invocation's token.
float select_experts(uint token, uint row, uint selected_groups) {
    uint num_groups = max(push.groups, 1u);
    uint size = push.experts / num_groups;
    float last = uintBitsToFloat(0x7F800000u);
    int last_id = -1;
    float sum = 0.0;
    FOR_COUNTED(k, 0u, push.top_k) {
        float best = kLowest;
        int best_id = -1;
        FOR_COUNTED(g, 0u, num_groups) {
            uint end = (selected_groups >> g & 1u) != 0u ? (g + 1u) * size : 0u;
            FOR_COUNTED(e, g * size, end) {
                float score = selection_score(row, e);
                bool after_last = score < last || (score == last && int(e) > last_id);
                if (after_last && (best_id < 0 || score > best)) {
                    best = score;
                    best_id = int(e);
                }
            } NEXT_COUNTED(e, end, 1u);
        } NEXT_COUNTED(g, num_groups, 1u);
        push.operands.topk_ids.v[token * push.top_k + k] = best_id;
        sum += kept_score(row, uint(best_id));
        last = best;
        last_id = best_id;
    } NEXT_COUNTED(k, push.top_k, 1u);
    return sum;
}

void main() {
    FOR_ROWS(token, push.tokens) {
        uint row = token * push.experts;
        write_scores(row);
        uint selected = select_groups(row);
        float sum = 0.0;
        if (row_per_workgroup != 0u) {
            sum = rank_experts(token, row, selected);
        } else {
            sum = select_experts(token, row, selected);
        }
        float factor = push.normalise != 0u ? push.route_scale / (sum + 1e-20) : push.route_scale;
        if (row_per_workgroup != 0u) {
            for (uint k = gl_LocalInvocationIndex; k < push.top_k; k += local_size) {
                push.operands.topk_weights.v[token * push.top_k + k] =
                    shared_scores[shared_chosen[k]] * factor;
            }
            barrier();
        } else {
            FOR_COUNTED(k, 0u, push.top_k) {
                uint slot = token * push.top_k + k;
                uint expert = uint(push.operands.topk_ids.v[slot]);
                push.operands.topk_weights.v[slot] = kept_score(row, expert) * factor;
            } NEXT_COUNTED(k, push.top_k, 1u);
        }
    } NEXT_ROW(token, push.tokens);
}
