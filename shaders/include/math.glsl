// SPDX-License-Identifier: MIT
// exp and log from additions and multiplications alone (the single-precision approximations of
// S. Moshier's Cephes library), kept from contraction: the same bits on every driver and an error
// below 2 ulp, where Vulkan's own exp may be off by 3 + 2|x| ulp. NaN stays NaN.
#ifndef BELLOWS_MATH_GLSL
#define BELLOWS_MATH_GLSL

bool is_nan(float x) {
    return (floatBitsToUint(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

// e^x; 0 below -87.3, e^88 above 88.
float exp_f32(float x) {
    float limited = clamp(x, -87.3, 88.0);
    precise float n = floor(limited * 1.44269504088896341 + 0.5);
    precise float r = limited - n * 0.693359375;
    r = r - n * -2.12194440e-4;
    precise float p = 1.9875691500e-4;
    p = p * r + 1.3981999507e-3;
    p = p * r + 8.3334519073e-3;
    p = p * r + 4.1665795894e-2;
    p = p * r + 1.6666665459e-1;
    p = p * r + 5.0000001201e-1;
    p = p * (r * r) + r + 1.0;
    precise float power = p * uintBitsToFloat(uint(int(n) + 127) << 23);
    return is_nan(x) ? x : (x < -87.3 ? 0.0 : power);
}

vec4 exp_f32(vec4 x) {
    return vec4(exp_f32(x.x), exp_f32(x.y), exp_f32(x.z), exp_f32(x.w));
}

// ln((1 + r) * 2^e) for r in [-0.3, 0.42].
float log_scaled(float r, float e) {
    precise float z = r * r;
    precise float p = 7.0376836292e-2;
    p = p * r - 1.1514610310e-1;
    p = p * r + 1.1676998740e-1;
    p = p * r - 1.2420140846e-1;
    p = p * r + 1.4249322787e-1;
    p = p * r - 1.6668057665e-1;
    p = p * r + 2.0000714765e-1;
    p = p * r - 2.4999993993e-1;
    p = p * r + 3.3333331174e-1;
    precise float y = p * r * z;
    y = y + e * -2.12194440e-4;
    y = y - 0.5 * z;
    precise float result = r + y + e * 0.693359375;
    return result;
}

// The natural logarithm of a positive normal x.
float log_f32(float x) {
    uint bits = floatBitsToUint(x);
    float mantissa = uintBitsToFloat((bits & 0x007FFFFFu) | 0x3F000000u); // [0.5, 1)
    float e = float(int(bits >> 23) - 126);
    bool low = mantissa < 0.707106781186547524;
    e = low ? e - 1.0 : e;
    precise float r = low ? mantissa + mantissa - 1.0 : mantissa - 1.0;
    float result = log_scaled(r, e);
    return is_nan(x) ? x : result;
}

float sigmoid(float x) {
    return 1.0 / (1.0 + exp_f32(-x));
}

vec4 sigmoid(vec4 x) {
    return vec4(1.0) / (vec4(1.0) + exp_f32(-x));
}

#endif
