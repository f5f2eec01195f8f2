// SPDX-License-Identifier: MIT
// The routing part of records that hold a rank's tokens in their order, for all ranks alike: global
// expert ids and weights. Records from `tokens` to `records` are there for nobody: ids -1.
//   topk_ids [tokens, top_k] i32, topk_weights [tokens, top_k] f32, words: records as words
//   (include/exchange.glsl)
// Dispatch: one invocation per choice of a record, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_label.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint slots = push.records * push.top_k;
    for (uint slot = gl_GlobalInvocationID.x; slot < slots;
         slot += gl_NumWorkGroups.x * local_size) {
        uint token = slot / push.top_k;
        uint to = token * push.record_words + push.hidden_words + slot % push.top_k;
        uint id = 0xFFFFFFFFu, weight = 0u;
        if (token < push.tokens) {
            id = uint(push.operands.topk_ids.v[slot]);
            weight = floatBitsToUint(push.operands.topk_weights.v[slot]);
        }
        push.operands.words.v[to] = id;
        push.operands.words.v[to + push.top_k] = weight;
    }
}
