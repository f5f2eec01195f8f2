// SPDX-License-Identifier: MIT
// Last step of the placement: rows are ordered by (expert, token, k), each expert's rows starting
// at offsets[expert]. Both maps are written: row -> slot = token * top_k + k, and slot -> row.
//   topk_ids [slots] i32, token_count [1] u32 (see moe_count.comp)
//   block_counts [blocks, experts] u32: as moe_prefix.comp left them; used up here
//   offsets [experts + 1] u32
//   row_to_slot [rows] i32, filled with -1 before; slot_to_row [slots] i32, -1 for "not here"
// Dispatch: one invocation per block of block_slots slots. No atomics, no shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_place.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint block = gl_GlobalInvocationID.x;
    uint first = block * push.block_slots;
    if (first >= push.slots) {
        return;
    }
    uint end = min(first + push.block_slots, push.slots);
    uint limit = push.slots;
    if (push.has_token_count != 0u) {
        limit = min(limit, push.operands.token_count.v[0] * push.top_k);
    }
    for (uint slot = first; slot < end; ++slot) {
        uint expert = uint(push.operands.topk_ids.v[slot]);
        int row = -1;
        if (slot < limit && expert < push.experts) {
            uint cursor = block * push.experts + expert;
            uint position = push.operands.block_counts.v[cursor];
            push.operands.block_counts.v[cursor] = position + 1u;
            row = int(push.operands.offsets.v[expert] + position);
            push.operands.row_to_slot.v[row] = int(slot);
        }
        push.operands.slot_to_row.v[slot] = row;
    }
}
