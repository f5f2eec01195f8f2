// SPDX-License-Identifier: MIT
// codes = x in E4M3 or E5M2 without a scale: nearest, ties to even, saturating; NaN is 0x7F.
//   x [4 * count4] f32, codes [4 * count4] bytes
// Dispatch: see include/flat.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8.glsl"
#include "fp8_encode.kernel.glsl"
#include "include/flat.glsl"

void main() {
    FOR_FLAT(i, push.count4) {
        push.operands.codes.v[i] = fp8_encode4(format, push.operands.x.v[i]);
    } END_FLAT
}
