// SPDX-License-Identifier: MIT
// A tensor to E4M3 or E5M2 with one scale that is known: codes = encode(x * inverse_scale(scale)).
//   x [batch, rows, columns] f32 or bf16, scale [1] f32, codes [batch, rows, columns] bytes;
//   row_count [1] u32: rows that are there. Strides in eights of elements; rows of codes end in zeros
//   up to a multiple of 16.
// Dispatch: include/fp8_flat_rows.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_eight.glsl"
#include "fp8_quantize_tensor.kernel.glsl"
#include "include/fp8_flat_rows.glsl"

void main() {
    uint rows = push.rows;
    if (push.has_row_count != 0u) {
        rows = min(rows, push.operands.row_count.v[0]);
    }
    uint batch = gl_WorkGroupID.z;
    uvec2 x = address_add(uvec2(push.operands.x), batch, push.x_batch8, X_LOG2_BYTES);
    uvec2 codes_at = address_add(uvec2(push.operands.codes), batch, push.codes_batch8, 3u);
    float inverse = fp8_inverse(rule, push.operands.scale.v[0]);
    // A branch costs GPUs less than what it skips; CPU drivers take both sides.
    bool fits = local_size > 8u && fp8_block_fits(format, inverse);
    uint group = flat_group();
    FOR_FLAT_ROWS(first, rows) {
        Raw8 raw[kFlatSteps];
        [[unroll]] for (uint i = 0u; i < kFlatSteps; ++i) {
            uint row = min(flat_row(first, i), rows - 1u);
            raw[i] = load8(x, row * push.x_stride8, group, push.columns);
        }
        [[unroll]] for (uint i = 0u; i < kFlatSteps; ++i) {
            uint row = flat_row(first, i);
            if (row < rows && group < push.codes_groups) {
                // Absent elements count for nothing here: their codes are cleared.
                uvec2 codes = encode_block8(format, unpack8(raw[i]), inverse, fits);
                WriteUvec2(codes_at).v[row * push.codes_stride8 + group] =
                    keep_present(codes, present(group, push.columns));
            }
        }
    } NEXT_FLAT_ROWS(first, rows);
}
