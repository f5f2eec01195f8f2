// SPDX-License-Identifier: MIT
// The scale of a whole tensor from the bits of its largest |x|, in place: fp8/recipe.hpp.
//   scale [1]: u32 bits of amax before, f32 afterwards
// Dispatch: one workgroup. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/fp8.glsl"
#include "fp8_tensor_scale.kernel.glsl"

layout(local_size_x = 1) in;

void main() {
    push.operands.scale.v[0] = floatBitsToUint(fp8_scale(format, rule, push.operands.scale.v[0]));
}
