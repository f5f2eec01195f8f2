// SPDX-License-Identifier: MIT
// Keys of latent attention: keys[t, h] = (kv_up[t, h, 0..nope-1], k_rope[t]).
//   kv_up [tokens, heads, >= nope] with token and head strides, k_rope [tokens, rope] with a token
//   stride, keys [tokens, heads, nope + rope] contiguous
// Dispatch: see include/rows.glsl; a row is a (token, head).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "mla_keys_forward.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(row, push.tokens * push.heads) {
        uint token = row / push.heads;
        uint head = row % push.heads;
        uint up_at = token * push.kv_token4 + head * push.kv_head4;
        uint rope_at = token * push.rope_token4;
        uint keys_at = row * (push.nope4 + push.rope4);
        FOR_COLUMNS(c, push.nope4) {
            push.operands.keys.v[keys_at + c] = push.operands.kv_up.v[up_at + c];
        } NEXT_COLUMN(c, push.nope4);
        FOR_COLUMNS(c, push.rope4) {
            push.operands.keys.v[keys_at + push.nope4 + c] = push.operands.k_rope.v[rope_at + c];
        } NEXT_COLUMN(c, push.rope4);
    } NEXT_ROW(row, push.tokens * push.heads);
}
