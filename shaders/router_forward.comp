// SPDX-License-Identifier: MIT
// Router of one token: include/router_choice.glsl has the rules.
//   logits, scores [tokens, experts] f32, bias [experts] f32
//   topk_ids [tokens, top_k] i32 in descending order of s + bias, topk_weights [tokens, top_k] f32
// Dispatch: see include/rows.glsl; a row is a token. One workgroup per token needs a local_size of 32,
// of top_k and, by subgroups, of theirs at least, and shared_experts >= experts; one invocation per
// token shared_experts = 1.
// Shared memory: include/router_choice.glsl, and 4 * local_size bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_forward.kernel.glsl"
uint row_of_scores;
void keep_score(uint expert, float score) {
    push.operands.scores.v[row_of_scores + expert] = score;
}
#include "include/router_choice.glsl"
#include "include/rows.glsl"

// An invocation keeps its token's scores in memory and its groups here:
float own_group_scores[kMaxGroups];

void write_scores(uint row) {
    if (push.use_softmax == 0u) {
        FOR_COUNTED(e, 0u, push.experts) {
            push.operands.scores.v[row + e] = sigmoid(push.operands.logits.v[row + e]);
        } NEXT_COUNTED(e, push.experts, 1u);
        return;
    }
    float most = kLowest;
    FOR_COUNTED(e, 0u, push.experts) {
        most = max(most, push.operands.logits.v[row + e]);
    } NEXT_COUNTED(e, push.experts, 1u);
    float sum = 0.0;
    FOR_COUNTED(e, 0u, push.experts) {
        float power = exp_f32(push.operands.logits.v[row + e] - most);
        push.operands.scores.v[row + e] = power;
        sum += power;
    } NEXT_COUNTED(e, push.experts, 1u);
    FOR_COUNTED(e, 0u, push.experts) {
        push.operands.scores.v[row + e] = push.operands.scores.v[row + e] / sum;
    } NEXT_COUNTED(e, push.experts, 1u);
}

float selection_score(Router router, uint row, uint expert) {
    return selection_of(router, expert, push.operands.scores.v[row + expert]);
}

// Bit g set: group g may be drawn from.
uint select_groups(Router router, uint row) {
    if (push.groups <= 1u) {
        return 1u;
    }
    uint size = push.experts / push.groups;
    FOR_COUNTED(g, 0u, push.groups) {
        vec2 best = vec2(kLowest);
        uint end = (g + 1u) * size;
        FOR_COUNTED(e, g * size, end) {
            best = best_two(best, selection_score(router, row, e));
        } NEXT_COUNTED(e, end, 1u);
        own_group_scores[g] = score_of_group(router, best);
    } NEXT_COUNTED(g, push.groups, 1u);
    uint selected = 0u;
    FOR_COUNTED(g, 0u, push.groups) {
        uint rank = 0u;
        for (uint h = 0u; h < push.groups; ++h) {
            rank += group_before(own_group_scores[h], h, own_group_scores[g], g) ? 1u : 0u;
        }
        selected |= rank < push.group_top_k ? 1u << g : 0u;
    } NEXT_COUNTED(g, push.groups, 1u);
    return selected;
}

// Writes the ids of an invocation's token; returns the sum of the chosen scores.
float select_experts(Router router, uint token, uint row, uint selected_groups) {
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
                float score = selection_score(router, row, e);
                bool after_last = score < last || (score == last && int(e) > last_id);
                if (after_last && (best_id < 0 || score > best)) {
                    best = score;
                    best_id = int(e);
                }
            } NEXT_COUNTED(e, end, 1u);
        } NEXT_COUNTED(g, num_groups, 1u);
        push.operands.topk_ids.v[token * push.top_k + k] = best_id;
        sum += push.operands.scores.v[row + uint(best_id)];
        last = best;
        last_id = best_id;
    } NEXT_COUNTED(k, push.top_k, 1u);
    return sum;
}

void main() {
    Router router = Router(push.experts, push.top_k, push.groups, push.group_top_k, push.group_score_top,
                           push.use_softmax != 0u, push.normalise != 0u, push.has_bias != 0u,
                           push.route_scale, uvec2(push.operands.bias));
    FOR_ROWS(token, push.tokens) {
        uint row = token * push.experts;
        if (row_per_workgroup != 0u) {
            row_of_scores = row;
            uvec2 logits = address_add(uvec2(push.operands.logits), token, push.experts, 2u);
            Choice choice = choose_experts(router, logits, gl_LocalInvocationIndex);
            if (gl_LocalInvocationIndex < push.top_k) {
                uint slot = token * push.top_k + gl_LocalInvocationIndex;
                push.operands.topk_ids.v[slot] = int(choice.expert);
                push.operands.topk_weights.v[slot] = choice.score * weight_factor(router, choice.sum);
            }
            barrier();
        } else {
            write_scores(row);
            float sum = select_experts(router, token, row, select_groups(router, row));
            float factor = weight_factor(router, sum);
            FOR_COUNTED(k, 0u, push.top_k) {
                uint slot = token * push.top_k + k;
                uint expert = uint(push.operands.topk_ids.v[slot]);
                push.operands.topk_weights.v[slot] = push.operands.scores.v[row + expert] * factor;
            } NEXT_COUNTED(k, push.top_k, 1u);
        }
    } NEXT_ROW(token, push.tokens);
}
