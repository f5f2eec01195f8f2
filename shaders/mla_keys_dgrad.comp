// SPDX-License-Identifier: MIT
// Gradients of the keys of latent attention (mla_keys_forward.comp):
// d_kv_up[t, h, 0..nope-1] = d_keys[t, h, 0..nope-1],
// d_k_rope[t] = sum over h ascending of d_keys[t, h, nope..].
//   d_keys [tokens, heads, nope + rope] contiguous; d_kv_up, d_k_rope with strides as there
// Dispatch: see include/rows.glsl; a row is a token.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "mla_keys_dgrad.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint width4 = push.nope4 + push.rope4;
    FOR_ROWS(token, push.tokens) {
        uint keys_at = token * push.heads * width4;
        for (uint head = 0u; head < push.heads; ++head) {
            uint up_at = token * push.kv_token4 + head * push.kv_head4;
            FOR_COLUMNS(c, push.nope4) {
                push.operands.d_kv_up.v[up_at + c] =
                    push.operands.d_keys.v[keys_at + head * width4 + c];
            } NEXT_COLUMN(c, push.nope4);
        }
        FOR_COLUMNS(c, push.rope4) {
            vec4 sum = vec4(0);
            for (uint head = 0u; head < push.heads; ++head) {
                uint at = keys_at + head * width4 + push.nope4 + c;
                sum += load4(push.operands.d_keys.v[at]);
            }
            push.operands.d_k_rope.v[token * push.rope_token4 + c] = store4(sum);
        } NEXT_COLUMN(c, push.rope4);
    } NEXT_ROW(token, push.tokens);
}
