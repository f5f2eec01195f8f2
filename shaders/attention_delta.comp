// SPDX-License-Identifier: MIT
// First step of attention's backward pass:
//   delta[t][h] = sum over d of o[t][h][d] * grad_o[t][h][d]
//
// o, grad_o  [tokens, heads, v_dim] f32 or bf16 (variant), strides as in attention_forward.comp
// delta      [tokens, heads] f32, dense
// Constants  aligned, v_dim as in attention_forward.comp
// Dispatch   x = ceil(tokens * heads / 64). One invocation per row; no shared memory.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"

#include "include/attention_types.glsl"

#include "attention_delta.kernel.glsl"

const uint share_rows = 0u;
const uint per_invocation = 1u;
const uint parts = 1u;
#include "include/attention_tile.glsl"

layout(local_size_x = 64) in;

void main() {
    uint index = gl_GlobalInvocationID.x;
    if (index >= push.tokens * push.heads) {
        return;
    }
    uint token = index / push.heads;
    uint head = index % push.heads;
    HeadView o = head_view(uvec2(push.operands.o), token, 1u, head, push.o_token, push.o_head,
                           v_dim);
    HeadView grad_o = head_view(uvec2(push.operands.grad_o), token, 1u, head, push.grad_o_token,
                                push.grad_o_head, v_dim);
    float sum = 0.0;
    uint d = 0u;
    do {
        vec4 x = load_quad(o, 0u, d);
        vec4 y = load_quad(grad_o, 0u, d);
        [[unroll]] for (uint e = 0u; e < 4u; ++e) {
            sum = fma(x[e], y[e], sum);
        }
        d += 4u;
    } while (d < v_dim);
    push.operands.delta.v[index] = sum;
}
