// SPDX-License-Identifier: MIT
// Router of one token: scores s = sigmoid(logits) or softmax(logits); the top_k experts by s + bias
// (the bias takes part in the selection only), drawn from the group_top_k best of `groups` equal
// groups when groups > 1, where a group counts by the sum of its group_score_top best s + bias;
// weights w = s[expert] (/ sum of the chosen s) * route_scale. Equal values: the lower index first.
//   logits, scores [tokens, experts] f32, bias [experts] f32
//   topk_ids [tokens, top_k] i32 in descending order of s + bias, topk_weights [tokens, top_k] f32
// Dispatch: one invocation per token, grid-stride. At most 32 groups. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_forward.kernel.glsl"

layout(local_size_x_id = 0) in;

#define kLowest uintBitsToFloat(0xFF800000u)

// Above every NaN stands every number.
float selection_score(uint row, uint expert) {
    float score = push.operands.scores.v[row + expert];
    if (push.has_bias != 0u) {
        score += push.operands.bias.v[expert];
    }
    return is_nan(score) ? kLowest : score;
}

void write_scores(uint row) {
    if (push.use_softmax == 0u) {
        for (uint e = 0u; e < push.experts; ++e) {
            push.operands.scores.v[row + e] = sigmoid(push.operands.logits.v[row + e]);
        }
        return;
    }
    float most = kLowest;
    for (uint e = 0u; e < push.experts; ++e) {
        most = max(most, push.operands.logits.v[row + e]);
    }
    float sum = 0.0;
    for (uint e = 0u; e < push.experts; ++e) {
        float power = exp_f32(push.operands.logits.v[row + e] - most);
        push.operands.scores.v[row + e] = power;
        sum += power;
    }
    for (uint e = 0u; e < push.experts; ++e) {
        push.operands.scores.v[row + e] = push.operands.scores.v[row + e] / sum;
    }
}

// Bit g set: group g may be drawn from.
uint select_groups(uint row) {
    if (push.groups <= 1u) {
        return 1u;
    }
    uint size = push.experts / push.groups;
    float value[32];
    for (uint g = 0u; g < push.groups; ++g) {
        float first = kLowest;
        float second = kLowest;
        for (uint e = g * size; e < (g + 1u) * size; ++e) {
            float score = selection_score(row, e);
            second = score > first ? first : max(second, score);
            first = max(first, score);
        }
        value[g] = push.group_score_top > 1u ? first + second : first;
    }
    uint selected = 0u;
    for (uint g = 0u; g < push.groups; ++g) {
        uint rank = 0u;
        for (uint h = 0u; h < push.groups; ++h) {
            bool before = value[h] > value[g] || (value[h] == value[g] && h < g);
            rank += before ? 1u : 0u;
        }
        selected |= rank < push.group_top_k ? 1u << g : 0u;
    }
    return selected;
}

// Writes the ids of a token; returns the sum of the chosen scores.
float select_experts(uint token, uint row, uint selected_groups) {
    uint num_groups = max(push.groups, 1u);
    uint size = push.experts / num_groups;
    float last = uintBitsToFloat(0x7F800000u);
    int last_id = -1;
    float sum = 0.0;
    for (uint k = 0u; k < push.top_k; ++k) {
        float best = kLowest;
        int best_id = -1;
        for (uint g = 0u; g < num_groups; ++g) {
            if ((selected_groups >> g & 1u) == 0u) {
                continue;
            }
            for (uint e = g * size; e < (g + 1u) * size; ++e) {
                float score = selection_score(row, e);
                bool after_last = score < last || (score == last && int(e) > last_id);
                if (after_last && (best_id < 0 || score > best)) {
                    best = score;
                    best_id = int(e);
                }
            }
        }
        push.operands.topk_ids.v[token * push.top_k + k] = best_id;
        sum += push.operands.scores.v[row + uint(best_id)];
        last = best;
        last_id = best_id;
    }
    return sum;
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint token = gl_GlobalInvocationID.x; token < push.tokens; token += step) {
        uint row = token * push.experts;
        write_scores(row);
        float sum = select_experts(token, row, select_groups(row));
        float factor = push.normalise != 0u ? push.route_scale / (sum + 1e-20) : push.route_scale;
        for (uint k = 0u; k < push.top_k; ++k) {
            uint slot = token * push.top_k + k;
            uint expert = uint(push.operands.topk_ids.v[slot]);
            push.operands.topk_weights.v[slot] = push.operands.scores.v[row + expert] * factor;
        }
    }
}
