// SPDX-License-Identifier: MIT
// Rows of a grouped product that stand elsewhere than in the order of its groups (GroupedRows::slots,
// fp8/groups.hpp), copied there or back:
//   share > 0   to[r] = from[slots[r] / share], zeros where the slot is -1
//   share = 0   to[slots[r]] = from[r], added to what is there with `accumulate` (f32)
//   from, to    rows of `words` words, so many words apart; `half_row` 1: of the last word only the
//               low half is there, the other half of to's is kept
//   tiles, ends the work list of the rows r: grouped_gemm_tiles.comp
// wide: copied there by four words; all sizes and addresses are multiples of them.
// Dispatch: indirect, x = number of tiles, any y. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"
#include "fp8_move_rows.kernel.glsl"

layout(local_size_x_id = 0) in;

void move_word(uint row, uint word) {
    int slot = push.operands.slots.v[row];
    if (push.share > 0u) {
        uint value = 0u;
        if (slot >= 0) {
            value = push.operands.source.v[uint(slot) / push.share * push.from_ld + word];
        }
        push.operands.result.v[row * push.to_ld + word] = value;
    } else if (slot >= 0) {
        uint value = push.operands.source.v[row * push.from_ld + word];
        uint to = uint(slot) * push.to_ld + word;
        if (push.accumulate != 0u) {
            value = floatBitsToUint(uintBitsToFloat(value) +
                                    uintBitsToFloat(push.operands.result.v[to]));
        } else if (push.half_row != 0u && word + 1u == push.words) {
            value = (value & 0xFFFFu) | (push.operands.result.v[to] & 0xFFFF0000u);
        }
        push.operands.result.v[to] = value;
    }
}

void move_four(uint row, uint four) {
    int slot = push.operands.slots.v[row];
    uvec4 value = uvec4(0);
    if (slot >= 0) {
        value = ReadUvec4(push.operands.source)
                    .v[uint(slot) / push.share * (push.from_ld / 4u) + four];
    }
    WriteUvec4(push.operands.result).v[row * (push.to_ld / 4u) + four] = value;
}

void main() {
    uint group = push.operands.tiles.v[2u * gl_WorkGroupID.x];
    uint first = push.operands.tiles.v[2u * gl_WorkGroupID.x + 1u];
    uint end = min(first + push.tile_rows, push.operands.ends.v[group]);
    uint units = wide != 0u ? push.words / 4u : push.words;
    uint items = end > first ? (end - first) * units : 0u;
    for (uint i = gl_WorkGroupID.y * local_size + gl_LocalInvocationIndex; i < items;
         i += gl_NumWorkGroups.y * local_size) {
        if (wide != 0u) {
            move_four(first + i / units, i % units);
        } else {
            move_word(first + i / units, i % units);
        }
    }
}
