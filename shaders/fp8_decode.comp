// SPDX-License-Identifier: MIT
// y = the values of E4M3 or E5M2 codes, exact.
//   codes [4 * count4] bytes, y [4 * count4] f32
// Dispatch: see include/flat.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8.glsl"
#include "fp8_decode.kernel.glsl"
#include "include/flat.glsl"

void main() {
    FOR_FLAT(i, push.count4) {
        push.operands.y.v[i] = fp8_decode4(format, push.operands.codes.v[i]);
    } END_FLAT
}
