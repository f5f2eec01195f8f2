// SPDX-License-Identifier: MIT
// The arithmetic of out = silu(gate) * up * weight, silu(g) = g * sigmoid(g), and of its gradients,
// which the compiler may not contract: every kernel that holds it gives the same bits. With s =
// sigmoid(gate), d = d_out * weight: d_up = d * gate * s, d_gate = d * up * s * (1 + gate * (1 - s)),
// d_weight = sum over columns of d_out * silu(gate) * up.
#ifndef BELLOWS_SWIGLU_GLSL
#define BELLOWS_SWIGLU_GLSL

// 1 / (1 + e^-x), correct to a few ulp above -87, where it stays. The device's exp2 is given the
// argument's rounding error as a factor; math.glsl's exp, which has the same bits on every driver,
// would cost more arithmetic than a GPU has time for while it reads gate and up.
vec4 logistic(vec4 x) {
    const float high = -1.44269502, low = -1.92596299e-8; // -log2(e) in two parts
    precise vec4 limited = clamp(x, vec4(-87.0), vec4(87.0));
    precise vec4 exponent = limited * high;
    precise vec4 rest = fma(limited, vec4(-high), exponent); // what the product lacks, negated
    precise vec4 error = fma(limited, vec4(-low), rest);
    precise vec4 power = exp2(exponent);
    precise vec4 corrected = fma(power, error * -0.693147181, power);
    precise vec4 result = vec4(1.0) / (vec4(1.0) + corrected);
    return result;
}

vec4 swiglu4(vec4 gate, vec4 up, float weight) {
    precise vec4 hidden = gate * logistic(gate) * up;
    precise vec4 weighted = weight * hidden;
    return weighted;
}

struct SwigluGradient {
    vec4 d_gate;
    vec4 d_up;
    vec4 d_weight; // terms of the sum
};

SwigluGradient swiglu_gradient4(vec4 gate, vec4 up, vec4 d_out, float weight) {
    precise vec4 s = logistic(gate);
    precise vec4 silu = gate * s;
    precise vec4 d = weight * d_out;
    precise vec4 d_weight = d_out * (silu * up);
    precise vec4 d_gate = d * up * s * (vec4(1.0) + gate * (vec4(1.0) - s));
    precise vec4 d_up = d * silu;
    return SwigluGradient(d_gate, d_up, d_weight);
}

vec4 add_terms(vec4 sum, vec4 terms) {
    precise vec4 result = sum + terms;
    return result;
}

#endif
