// SPDX-License-Identifier: MIT
// counts[r, e] += number of slots of run r with topk_ids == e; a run is `run_slots` slots. Integer
// sums: the order of the atomics is invisible. Ids outside 0..experts-1 are not counted.
//   topk_ids [tokens, top_k] i32, slots of them all; (has_token_count) only the first token_count [1]
//   u32 of them are there; counts [runs, experts] u32
// Dispatch: one invocation per 16 slots, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "expert_counts.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    uint slots = push.slots;
    if (push.has_token_count != 0u) {
        slots = min(slots, push.operands.token_count.v[0] * push.top_k);
    }
    for (uint slot = gl_GlobalInvocationID.x; slot < slots; slot += step) {
        uint expert = uint(push.operands.topk_ids.v[slot]);
        if (expert < push.experts) {
            atomicAdd(push.operands.counts.v[slot / push.run_slots * push.experts + expert], 1u);
        }
    }
}
