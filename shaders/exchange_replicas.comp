// SPDX-License-Identifier: MIT
// Where each choice of a token goes among the slots that hold its expert: slots[t, k] is one of those
// that `replicas` lists for expert topk_ids[t, k], the (t + source)-th of them, counted round; -1 for
// ids outside 0..experts-1.
//   topk_ids, slots [tokens, top_k] i32; replicas u32: of each expert where its slots begin among
//   these words and how many there are, 1 at least; then slots
// Dispatch: one invocation per choice, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_replicas.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint count = push.tokens * push.top_k;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += gl_NumWorkGroups.x * local_size) {
        int expert = push.operands.topk_ids.v[i], slot = -1;
        if (expert >= 0 && expert < int(push.experts)) {
            uint first = push.operands.replicas.v[2u * uint(expert)];
            uint live = push.operands.replicas.v[2u * uint(expert) + 1u];
            slot = int(push.operands.replicas.v[first + (i / push.top_k + push.source) % live]);
        }
        push.operands.slots.v[i] = slot;
    }
}
