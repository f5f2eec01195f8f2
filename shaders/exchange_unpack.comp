// SPDX-License-Identifier: MIT
// The routing part of received records: local expert ids and weights of each; of ids first ..
// first + experts, which become local ones, -1 and 0 for others. (merge) Of choices of the same
// expert the first one gets the weights of all, the others become -1.
//   record_words: records as words (include/exchange.glsl), record_count [1] u32,
//   topk_ids [records, top_k] i32, topk_weights [records, top_k] f32
// Dispatch: one invocation per record, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_unpack.kernel.glsl"

layout(local_size_x_id = 0) in;

// The first choice of the record that is this local expert; k if none before k is.
uint first_choice(uint record, uint k, uint local) {
    uint first = 0u;
    while (first < k && push.operands.topk_ids.v[record * push.top_k + first] != int(local)) {
        ++first;
    }
    return first;
}

void main() {
    uint records = min(push.records, push.operands.record_count.v[0]);
    uint record = gl_GlobalInvocationID.x;
    if (record >= records) {
        return;
    }
    do {
        uint from = record * push.record_words + push.hidden_words;
        uint k = 0u;
        do {
            uint local = push.operands.words.v[from + k] - push.first;
            bool here = local < push.experts;
            float weight = uintBitsToFloat(push.operands.words.v[from + push.top_k + k]);
            if (here && push.merge != 0u) {
                uint first = first_choice(record, k, local);
                if (first < k) {
                    push.operands.topk_weights.v[record * push.top_k + first] += weight;
                    here = false;
                }
            }
            push.operands.topk_ids.v[record * push.top_k + k] = here ? int(local) : -1;
            push.operands.topk_weights.v[record * push.top_k + k] = here ? weight : 0.0;
        } while (++k < push.top_k);
    } while ((record += gl_NumWorkGroups.x * local_size) < records);
}
