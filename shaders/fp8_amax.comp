// SPDX-License-Identifier: MIT
// amax = the bits of the largest |x| of a tensor; those of a NaN are larger than all others. The
// maximum of integers does not depend on the order of the atomics.
//   x [rows, columns] f32 or bf16, row stride in eights of elements; row_count [1] u32: rows that
//   are there; amax [1] u32, 0 before
// Dispatch: x = row blocks of kSteps * local_size / lanes_x rows (grid-stride), y = ceil(columns /
// (8 * lanes_x)), z = batch. Shared memory: 4 bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "fp8_amax.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kSteps = 4u; // rows that are loaded before the first is looked at
shared uint most;

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uvec2 base =
        address_add(uvec2(push.operands.x), gl_WorkGroupID.z, push.x_batch8, X_LOG2_BYTES);
    uint lane = gl_LocalInvocationIndex, step_rows = local_size / lanes_x;
    uint group = gl_WorkGroupID.y * lanes_x + lane % lanes_x;
    uint mine = 0u;
    for (uint row = gl_WorkGroupID.x * kSteps * step_rows + lane / lanes_x; row < rows;
         row += gl_NumWorkGroups.x * kSteps * step_rows) {
        Raw8 raw[kSteps];
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            uint at = min(row + i * step_rows, rows - 1u) * push.x_stride8;
            raw[i] = load8(base, at, group, push.columns);
        }
        [[unroll]] for (uint i = 0u; i < kSteps; ++i) {
            if (rows_end_within_eights(push.columns)) {
                raw[i] = clear8(raw[i], group, push.columns);
            }
            mine = max(mine, raw_magnitude8(raw[i]));
        }
    }
    if (lane == 0u) {
        most = 0u;
    }
    barrier();
    if (mine != 0u) {
        atomicMax(most, mine);
    }
    barrier();
    if (lane == 0u && most != 0u) {
        atomicMax(push.operands.amax.v[0], most);
    }
}
