// SPDX-License-Identifier: MIT
// The arithmetic of out = silu(gate) * up * weight, silu(g) = g * sigmoid(g), and of its gradients,
// which the compiler may not contract: every kernel that holds it gives the same bits. With s =
// sigmoid(gate), d = d_out * weight: d_up = d * gate * s, d_gate = d * up * s * (1 + gate * (1 - s)),
// d_weight = sum over columns of d_out * silu(gate) * up.
#ifndef BELLOWS_SWIGLU_GLSL
#define BELLOWS_SWIGLU_GLSL

#include "math.glsl"

vec4 swiglu4(vec4 gate, vec4 up, float weight) {
    precise vec4 hidden = gate * sigmoid(gate) * up;
    precise vec4 weighted = weight * hidden;
    return weighted;
}

struct SwigluGradient {
    vec4 d_gate;
    vec4 d_up;
    vec4 d_weight; // terms of the sum
};

SwigluGradient swiglu_gradient4(vec4 gate, vec4 up, vec4 d_out, float weight) {
    precise vec4 s = sigmoid(gate);
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
