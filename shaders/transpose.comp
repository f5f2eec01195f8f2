// SPDX-License-Identifier: MIT
// y = transpose(x), batched, of elements of two or four bytes, whose bits stay as they are.
//   x [batch, rows, columns], y [batch, columns, rows]; strides in fours of elements
// An invocation turns a block of 4 x 4 in its registers. lanes_x blocks side by side in x are those of
// neighbouring invocations, local_size / lanes_x of them stand one below the other: so many stand side
// by side in y, and both are read and written in whole sectors of memory without workgroup memory.
// Dispatch: any x; tiles of lanes_x by local_size / lanes_x blocks in turn. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"
#if STORAGE_BF16
#define S4 uvec2
#define ReadFour ReadUvec2
#define WriteFour WriteUvec2
#define FOUR_LOG2_BYTES 3u
#else
#define S4 uvec4
#define ReadFour ReadUvec4
#define WriteFour WriteUvec4
#define FOUR_LOG2_BYTES 4u
#endif
#include "transpose.kernel.glsl"

layout(local_size_x_id = 0) in;

// Column i of the block whose rows these are.
S4 column_of(S4 rows[4], uint i) {
#if STORAGE_BF16
    uint shift = 16u * (i % 2u), pair = i / 2u;
    return uvec2((rows[0][pair] >> shift & 0xFFFFu) | rows[1][pair] >> shift << 16u,
                 (rows[2][pair] >> shift & 0xFFFFu) | rows[3][pair] >> shift << 16u);
#else
    return uvec4(rows[0][i], rows[1][i], rows[2][i], rows[3][i]);
#endif
}

void main() {
    uint lanes_y = local_size / lanes_x, lane = gl_LocalInvocationIndex;
    uint tiles_x = div_up(push.columns4, lanes_x), tiles_y = div_up(push.rows4, lanes_y);
    for (uint tile = gl_WorkGroupID.x; tile < tiles_x * tiles_y * push.batch;
         tile += gl_NumWorkGroups.x) {
        uint column4 = tile % tiles_x * lanes_x + lane % lanes_x;
        uint row4 = tile / tiles_x % tiles_y * lanes_y + lane / lanes_x;
        uint g = tile / tiles_x / tiles_y;
        if (column4 < push.columns4 && row4 < push.rows4) {
            uvec2 x = address_add(uvec2(push.operands.x), g, push.x_batch4, FOUR_LOG2_BYTES);
            uvec2 y = address_add(uvec2(push.operands.y), g, push.y_batch4, FOUR_LOG2_BYTES);
            S4 rows[4];
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                rows[i] = ReadFour(x).v[(4u * row4 + i) * push.x_row4 + column4];
            }
            [[unroll]] for (uint i = 0u; i < 4u; ++i) {
                WriteFour(y).v[(4u * column4 + i) * push.y_row4 + row4] = column_of(rows, i);
            }
        }
    }
}
