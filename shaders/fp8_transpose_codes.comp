// SPDX-License-Identifier: MIT
// y = transpose(x) of matrices of bytes.
//   x [batch, rows, columns] bytes, whose rows go on to a multiple of four
//   y [batch, columns, rows up to a multiple of 16], 0 from `rows` on
// Strides in eights of bytes. An invocation turns 16 rows of four columns in its registers. lanes_x of
// them stand side by side in x and local_size / lanes_x side by side in y, so that both are read and
// written in whole sectors of memory.
// Dispatch: x = tiles of lanes_x fours of columns, y = tiles of local_size / lanes_x times 16 rows, z =
// batch. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8_turn.glsl"
#include "include/storage.glsl"
#include "fp8_transpose_codes.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    uint lane = gl_LocalInvocationIndex, batch = gl_WorkGroupID.z;
    uint column = 4u * (gl_WorkGroupID.x * lanes_x + lane % lanes_x);
    uint row16 = gl_WorkGroupID.y * (local_size / lanes_x) + lane / lanes_x;
    if (column >= push.columns || 16u * row16 >= push.rows) {
        return;
    }
    uvec2 x = address_add(uvec2(push.operands.x), batch, push.x_batch8, 3u);
    uvec2 y = address_add(uvec2(push.operands.y), batch, push.y_batch8, 3u);
    x = address_add(x, 16u * row16, push.x_stride8, 3u);
    uint rows[16];
    [[unroll]] for (uint k = 0u; k < 16u; ++k) {
        rows[k] = 0u;
        if (16u * row16 + k < push.rows) {
            rows[k] = ReadUint(x).v[k * 2u * push.x_stride8 + column / 4u];
        }
    }
    uvec4 turned[4]; // four rows each, a column in a word
    [[unroll]] for (uint q = 0u; q < 4u; ++q) {
        turned[q] = turn4(uvec4(rows[4u * q], rows[4u * q + 1u], rows[4u * q + 2u],
                                rows[4u * q + 3u]));
    }
    [[unroll]] for (uint i = 0u; i < 4u; ++i) {
        if (column + i < push.columns) {
            WriteUvec4(address_add(y, column + i, push.y_stride8, 3u)).v[row16] =
                uvec4(turned[0][i], turned[1][i], turned[2][i], turned[3][i]);
        }
    }
}
