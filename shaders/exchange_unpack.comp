// SPDX-License-Identifier: MIT
// The routing part of received records: local expert ids and weights of each; of ids first ..
// first + experts, which become local ones, -1 and 0 for others.
//   words: records as words (include/exchange.glsl), record_count [1] u32,
//   topk_ids [records, top_k] i32, topk_weights [records, top_k] f32
//   expert_counts [blocks, counters] u32: choices of block b, of block_slots each, that fall to
//           expert e, as moe_layout.comp wants it
// Constants  counters     experts, 1 if there are none; or 0: nothing is counted
// Dispatch: a workgroup per block, grid-stride. Shared: 4 * (counters + 1) bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_unpack.kernel.glsl"

layout(local_size_x_id = 0) in;
#include "include/block_counts.glsl"

void unpack(uint choice) {
    uint id = choice / push.top_k * push.record_words + push.hidden_words + choice % push.top_k;
    uint local = push.operands.words.v[id] - push.first;
    bool here = local < push.experts;
    float weight = uintBitsToFloat(push.operands.words.v[id + push.top_k]);
    push.operands.topk_ids.v[choice] = here ? int(local) : -1;
    push.operands.topk_weights.v[choice] = here ? weight : 0.0;
    if (counters > 0u && here) {
        count(local);
    }
}

void main() {
    uint choices = min(push.records, push.operands.record_count.v[0]) * push.top_k;
    for (uint block = gl_WorkGroupID.x; block < push.blocks; block += gl_NumWorkGroups.x) {
        clear_counts();
        uint end = min((block + 1u) * push.block_slots, choices);
        for (uint choice = block * push.block_slots + gl_LocalInvocationIndex; choice < end;
             choice += local_size) {
            unpack(choice);
        }
        barrier();
        for (uint expert = gl_LocalInvocationIndex; expert < counters; expert += local_size) {
            push.operands.expert_counts.v[block * counters + expert] = block_counts[expert];
        }
    }
}
