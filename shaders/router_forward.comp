// SPDX-License-Identifier: MIT
// Router of one token: scores s = sigmoid(logits) or softmax(logits); the top_k experts by s + bias
// (the bias takes part in the selection only), drawn from the group_top_k best of `groups` equal
// groups when groups > 1, where a group counts by the sum of its group_score_top best s + bias;
// weights w = s[expert] (/ sum of the chosen s) * route_scale. Equal values: the lower index first.
//   logits, scores [tokens, experts] f32, bias [experts] f32
//   topk_ids [tokens, top_k] i32 in descending order of s + bias, topk_weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a token. At most 32 groups; one workgroup per token needs
// local_size >= 32 and shared_experts >= experts, one invocation per token shared_experts = 1.
// Shared memory: 4 * (shared_experts + 3 * local_size + 32) bytes in the first form.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_forward.kernel.glsl"
#include "include/rows.glsl"

#define kLowest uintBitsToFloat(0xFF800000u)
const uint kMaxGroups = 32u;

// A workgroup's token; one invocation per token keeps its scores in memory and its groups here:
shared float shared_scores[shared_experts];
shared float shared_group_scores[kMaxGroups];
shared float best_scores[local_size];
shared int best_ids[local_size];
float own_group_scores[kMaxGroups];

void row_barrier() {
    if (row_per_workgroup != 0u) {
        barrier();
    }
}

void keep_score(uint row, uint expert, float score) {
    push.operands.scores.v[row + expert] = score;
    if (row_per_workgroup != 0u) {
        shared_scores[expert] = score;
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
            most = max(most, push.operands.logits.v[row + e]);
        } NEXT_COLUMN(e, push.experts);
        most = row_max(most);
        float sum = 0.0;
        FOR_COLUMNS(e, push.experts) {
            float power = exp_f32(push.operands.logits.v[row + e] - most);
            keep_score(row, e, power);
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
        best_ids[gl_LocalInvocationIndex] = int(selected);
        barrier();
        for (uint g = 0u; g < push.groups; ++g) {
            selected |= uint(best_ids[g]);
        }
        barrier();
    }
    return selected;
}

// The best of the candidates that the invocations of a row bring; id -1 is none.
void row_best(inout float score, inout int id) {
    if (row_per_workgroup == 0u) {
        return;
    }
    uint lane = gl_LocalInvocationIndex;
    best_scores[lane] = score;
    best_ids[lane] = id;
    barrier();
    for (uint width = local_size / 2u; width > 0u; width /= 2u) {
        if (lane < width) {
            float other = best_scores[lane + width];
            int other_id = best_ids[lane + width];
            bool better = best_ids[lane] < 0 || other > best_scores[lane] ||
                          (other == best_scores[lane] && other_id < best_ids[lane]);
            if (other_id >= 0 && better) {
                best_scores[lane] = other;
                best_ids[lane] = other_id;
            }
        }
        barrier();
    }
    score = best_scores[0];
    id = best_ids[0];
    barrier();
}

// Writes the ids of a token; returns the sum of the chosen scores.
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
            FOR_COUNTED(e, g * size + column_first(), end) {
                float score = selection_score(row, e);
                bool after_last = score < last || (score == last && int(e) > last_id);
                if (after_last && (best_id < 0 || score > best)) {
                    best = score;
                    best_id = int(e);
                }
            } NEXT_COUNTED(e, end, column_step());
        } NEXT_COUNTED(g, num_groups, 1u);
        row_best(best, best_id);
        if (row_leader()) {
            push.operands.topk_ids.v[token * push.top_k + k] = best_id;
        }
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
        float sum = select_experts(token, row, select_groups(row));
        float factor = push.normalise != 0u ? push.route_scale / (sum + 1e-20) : push.route_scale;
        if (row_leader()) {
            FOR_COUNTED(k, 0u, push.top_k) {
                uint slot = token * push.top_k + k;
                uint expert = uint(push.operands.topk_ids.v[slot]);
                push.operands.topk_weights.v[slot] = kept_score(row, expert) * factor;
            } NEXT_COUNTED(k, push.top_k, 1u);
        }
        row_barrier();
    } NEXT_ROW(token, push.tokens);
}
