// SPDX-License-Identifier: MIT
// Choices beyond what a group of experts has room for are dropped: kept_ids is topk_ids, or -1 for a
// slot whose group has `capacity` slots that go before it. Slots go by the scores of their tokens for
// their experts, the higher first, NaN last; the lower slot first among equals.
//   scores [tokens, experts] f32, topk_ids, kept_ids [tokens, top_k] i32; ids outside 0..experts-1
//   are in no group
// Every slot counts those before it: slots^2 comparisons, spread over all invocations.
// Dispatch: one invocation per slot, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_capacity.kernel.glsl"

layout(local_size_x_id = 0) in;

float score_of(uint slot, uint expert) {
    float score = push.operands.scores.v[slot / push.top_k * push.experts + expert];
    return is_nan(score) ? uintBitsToFloat(0xFF800000u) : score;
}

void main() {
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint slot = gl_GlobalInvocationID.x; slot < push.slots; slot += step) {
        uint expert = uint(push.operands.topk_ids.v[slot]);
        bool kept = false;
        if (expert < push.experts) {
            uint group = expert / push.group_experts;
            float own = score_of(slot, expert);
            uint before = 0u;
            FOR_COUNTED(other, 0u, push.slots) {
                uint other_expert = uint(push.operands.topk_ids.v[other]);
                if (other_expert < push.experts && other_expert / push.group_experts == group) {
                    float score = score_of(other, other_expert);
                    before += score > own || (score == own && other < slot) ? 1u : 0u;
                }
            } NEXT_COUNTED(other, push.slots, 1u);
            kept = before < push.capacity;
        }
        push.operands.kept_ids.v[slot] = kept ? int(expert) : -1;
    }
}
