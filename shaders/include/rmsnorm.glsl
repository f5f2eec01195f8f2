// SPDX-License-Identifier: MIT
// The arithmetic of y = x * inv_rms * gain, inv_rms = 1 / sqrt(mean(x^2) + eps), which the compiler
// may not contract: every kernel that holds it gives the same bits for the same order of the sum.
#ifndef BELLOWS_RMSNORM_GLSL
#define BELLOWS_RMSNORM_GLSL

vec4 add_squares(vec4 sum, vec4 x) {
    precise vec4 result = sum + x * x;
    return result;
}

float rms_inverse(float squares, uint columns4, float eps) {
    precise float mean = squares / float(4u * columns4);
    precise float inverse = 1.0 / sqrt(mean + eps);
    return inverse;
}

vec4 rms_scaled(vec4 x, float inv_rms, vec4 gain) {
    precise vec4 y = x * inv_rms * gain;
    return y;
}

#endif
