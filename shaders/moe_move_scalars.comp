// SPDX-License-Identifier: MIT
// out[i] = values[map[i]], 0 where map[i] is -1: one scalar per slot to one per row with
// map = row_to_slot, and back with map = slot_to_row.
//   values [..] f32, map [count] i32, out [count] f32, row_count [1] u32: how many of `count`
// Dispatch: one invocation per entry, grid-stride. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_move_scalars.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint count = push.count;
    if (push.has_row_count != 0u) {
        count = min(count, push.operands.row_count.v[0]);
    }
    uint step = gl_NumWorkGroups.x * local_size;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += step) {
        int from = push.operands.map.v[i];
        float value = 0.0;
        if (from >= 0) {
            value = push.operands.values.v[from];
        }
        push.operands.moved.v[i] = value;
    }
}
