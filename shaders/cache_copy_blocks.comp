// SPDX-License-Identifier: MIT
// Block pairs[i][1] of a cache = block pairs[i][0], for each i; nothing where the cache does not
// have one of them.
//   pairs [count, 2] u32, cache [blocks] of `units` times 16 bytes
// Dispatch: x = parts of a block, an invocation per 16 bytes, grid-stride, y = count, grid-stride. No
// shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"
#include "cache_copy_blocks.kernel.glsl"

layout(local_size_x_id = 0) in;

void main() {
    FOR_COUNTED(pair, gl_WorkGroupID.y, push.count) {
        uint from = push.operands.pairs.v[2u * pair], to = push.operands.pairs.v[2u * pair + 1u];
        if (from < push.blocks && to < push.blocks) {
            uvec2 source = address_add(uvec2(push.operands.cache), from, push.units, 4u);
            uvec2 destination = address_add(uvec2(push.operands.cache), to, push.units, 4u);
            for (uint i = gl_GlobalInvocationID.x; i < push.units;
                 i += gl_NumWorkGroups.x * local_size) {
                WriteUvec4(destination).v[i] = ReadUvec4(source).v[i];
            }
        }
    } NEXT_COUNTED(pair, push.count, gl_NumWorkGroups.y);
}
