// SPDX-License-Identifier: MIT
// AdamW with decoupled decay. With g = clip * gradient:
// m = beta1 m + (1 - beta1) g, v = beta2 v + (1 - beta2) g^2,
// w -= lr * (m * bias1 / (sqrt(v * bias2) + eps) + weight_decay * w).
//   weight, gradient [count] f32; m, v [count] f32 or bf16; weight_copy [count] bf16, optional
//   scalars [3] f32: lr, bias1 = 1 / (1 - beta1^t), bias2 = 1 / (1 - beta2^t)
//   clip [1] f32, used if has_clip
// Dispatch: see include/flat.glsl. No shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/tail.glsl"
#include "adamw.kernel.glsl"
#include "include/flat.glsl"

struct State {
    vec4 weight, m, v;
};

State advance(State s, vec4 gradient, float clip) {
    vec4 g = clip * gradient;
    s.m = push.beta1 * s.m + (1.0 - push.beta1) * g;
    s.v = push.beta2 * s.v + (1.0 - push.beta2) * (g * g);
    float lr = push.operands.scalars.v[0];
    vec4 mean = s.m * push.operands.scalars.v[1];
    vec4 deviation = sqrt(s.v * push.operands.scalars.v[2]) + vec4(push.eps);
    s.weight -= lr * (mean / deviation + push.weight_decay * s.weight);
    return s;
}

void main() {
    float clip = 1.0;
    if (push.has_clip != 0u) {
        clip = push.operands.clip.v[0];
    }
    FOR_FLAT(i, push.count4) {
        State s;
        s.weight = push.operands.weight.v[i];
        s.m = load4(push.operands.m.v[i]);
        s.v = load4(push.operands.v.v[i]);
        s = advance(s, push.operands.gradient.v[i], clip);
        push.operands.weight.v[i] = s.weight;
        push.operands.m.v[i] = store4(s.m);
        push.operands.v.v[i] = store4(s.v);
        if (push.has_copy != 0u) {
            push.operands.weight_copy.v[i] = bf16_pack(s.weight);
        }
    } END_FLAT
    if (push.tail != 0u && gl_GlobalInvocationID.x == 0u) {
        uint i = push.count4;
        State s;
        s.weight = load_tail_f32(uvec2(push.operands.weight), i, push.tail);
        s.m = load_tail(uvec2(push.operands.m), i, push.tail);
        s.v = load_tail(uvec2(push.operands.v), i, push.tail);
        s = advance(s, load_tail_f32(uvec2(push.operands.gradient), i, push.tail), clip);
        store_tail_f32(uvec2(push.operands.weight), i, push.tail, s.weight);
        store_tail(uvec2(push.operands.m), i, push.tail, s.m);
        store_tail(uvec2(push.operands.v), i, push.tail, s.v);
        if (push.has_copy != 0u) {
            store_tail_bf16(uvec2(push.operands.weight_copy), i, push.tail, s.weight);
        }
    }
}
