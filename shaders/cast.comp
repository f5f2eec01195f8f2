// SPDX-License-Identifier: MIT
// y = x in the other storage: f32 -> bf16 (round to nearest even) or bf16 -> f32 (exact).
//   x, y [count]
// Dispatch: see include/flat.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/storage.glsl"
#include "include/tail.glsl"
#if TO_BF16
#define X4 vec4
#define Y4 uvec2
#else
#define X4 uvec2
#define Y4 vec4
#endif
#include "cast.kernel.glsl"
#include "include/flat.glsl"

void main() {
    FOR_FLAT(i, push.count4) {
#if TO_BF16
        push.operands.y.v[i] = bf16_pack(push.operands.x.v[i]);
#else
        push.operands.y.v[i] = bf16_unpack(push.operands.x.v[i]);
#endif
    } END_FLAT
    if (push.tail != 0u && gl_GlobalInvocationID.x == 0u) {
        uvec2 x = uvec2(push.operands.x);
        uvec2 y = uvec2(push.operands.y);
#if TO_BF16
        store_tail_bf16(y, push.count4, push.tail, load_tail_f32(x, push.count4, push.tail));
#else
        store_tail_f32(y, push.count4, push.tail, load_tail_bf16(x, push.count4, push.tail));
#endif
    }
}
