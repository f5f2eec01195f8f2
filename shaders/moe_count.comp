// SPDX-License-Identifier: MIT
// First of four steps that place (token, k) slots in rows grouped by expert (see moe_place.comp):
// block_counts[b, e] = number of slots of block b that go to expert e.
//   topk_ids [slots] i32, -1 or any id outside 0..experts-1: not here
//   token_count [1] u32, used if has_token_count: slots of later tokens are not here either
//   block_counts [blocks, experts] u32
// Dispatch: one invocation per block of block_slots slots. No atomics, no shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_count.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint block = gl_GlobalInvocationID.x;
    uint first = block * push.block_slots;
    if (first >= push.slots) {
        return;
    }
    uint end = min(first + push.block_slots, push.slots);
    if (push.has_token_count != 0u) {
        end = min(end, push.operands.token_count.v[0] * push.top_k);
    }
    uint row = block * push.experts;
    for (uint e = 0u; e < push.experts; ++e) {
        push.operands.block_counts.v[row + e] = 0u;
    }
    for (uint slot = first; slot < end; ++slot) {
        uint expert = uint(push.operands.topk_ids.v[slot]);
        if (expert < push.experts) {
            push.operands.block_counts.v[row + expert] += 1u;
        }
    }
}
