// SPDX-License-Identifier: MIT
// Rows that stand close together, to those of a masked layout, where expert e's begin at row
// e * spacing: slot_to_row[s] = topk_ids[s] * spacing + slot_to_row[s] - offsets[topk_ids[s]], but
// for -1.
//   topk_ids, slot_to_row [slots] i32, offsets [experts + 1] u32
// Dispatch: one invocation per slot, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_mask.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    for (uint slot = gl_GlobalInvocationID.x; slot < push.slots;
         slot += gl_NumWorkGroups.x * local_size) {
        int row = push.operands.slot_to_row.v[slot];
        if (row >= 0) {
            uint expert = uint(push.operands.topk_ids.v[slot]);
            push.operands.slot_to_row.v[slot] =
                int(expert * push.spacing + uint(row) - push.operands.offsets.v[expert]);
        }
    }
}
