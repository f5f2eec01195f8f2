// SPDX-License-Identifier: MIT
// The routing part of received records: local expert ids and weights of each; of ids first ..
// first + experts, which become local ones, -1 and 0 for others.
//   words: records as words (include/exchange.glsl), record_count [1] u32,
//   topk_ids [records, top_k] i32, topk_weights [records, top_k] f32
// Dispatch: one invocation per choice, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_unpack.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint choices = min(push.records, push.operands.record_count.v[0]) * push.top_k;
    for (uint choice = gl_GlobalInvocationID.x; choice < choices;
         choice += gl_NumWorkGroups.x * local_size) {
        uint id = choice / push.top_k * push.record_words + push.hidden_words + choice % push.top_k;
        uint local = push.operands.words.v[id] - push.first;
        bool here = local < push.experts;
        float weight = uintBitsToFloat(push.operands.words.v[id + push.top_k]);
        push.operands.topk_ids.v[choice] = here ? int(local) : -1;
        push.operands.topk_weights.v[choice] = here ? weight : 0.0;
    }
}
