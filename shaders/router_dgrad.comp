// SPDX-License-Identifier: MIT
// Gradient of the router's weights with respect to its logits (the selection itself has none).
// With D = sum of the chosen scores (or 1): ds_k = scale / D * (dw_k - sum_j dw_j s_j / D), then
// through the sigmoid, dl = ds s (1 - s), or the softmax, dl = s (ds - sum_j ds_j s_j).
//   d_topk_weights [tokens, top_k] f32, topk_ids [tokens, top_k] i32, scores [tokens, experts] f32
//   d_logits [tokens, experts] f32
// Dispatch: one invocation per token, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "router_dgrad.kernel.glsl"

layout(local_size_x_id = 0) in;

float chosen_score(uint row, uint slot) {
    return push.operands.scores.v[row + uint(push.operands.topk_ids.v[slot])];
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint token = gl_GlobalInvocationID.x; token < push.tokens; token += step) {
        uint row = token * push.experts;
        uint first_slot = token * push.top_k;
        float sum = 0.0;
        float dot_scores = 0.0;
        for (uint k = 0u; k < push.top_k; ++k) {
            float score = chosen_score(row, first_slot + k);
            sum += score;
            dot_scores += push.operands.d_topk_weights.v[first_slot + k] * score;
        }
        float divisor = push.normalise != 0u ? sum + 1e-20 : 1.0;
        float shift = push.normalise != 0u ? dot_scores / divisor : 0.0;
        float factor = push.route_scale / divisor;
        // sum_j ds_j s_j
        float inner = factor * (dot_scores - shift * sum);

        for (uint e = 0u; e < push.experts; ++e) {
            float rest = push.use_softmax != 0u ? -inner * push.operands.scores.v[row + e] : 0.0;
            push.operands.d_logits.v[row + e] = rest;
        }
        for (uint k = 0u; k < push.top_k; ++k) {
            uint slot = first_slot + k;
            float score = chosen_score(row, slot);
            float d_score = factor * (push.operands.d_topk_weights.v[slot] - shift);
            float d_logit = push.use_softmax != 0u ? score * (d_score - inner)
                                                   : d_score * score * (1.0 - score);
            push.operands.d_logits.v[row + uint(push.operands.topk_ids.v[slot])] = d_logit;
        }
    }
}
