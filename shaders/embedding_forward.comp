// SPDX-License-Identifier: MIT
// out[t] = table[ids[t]]; zeros for an id outside the vocabulary.
//   ids [tokens] u32, table [vocab, columns], out [tokens, columns]
// Dispatch: see include/rows.glsl.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/gain.glsl"
#include "embedding_forward.kernel.glsl"
#include "include/rows.glsl"

void main() {
    FOR_ROWS(token, push.tokens) {
        uint id = push.operands.ids.v[token];
        uint to = token * push.columns4;
        if (id >= push.vocab) {
            FOR_COLUMNS(c, push.columns4) {
                push.operands.embedded.v[to + c] = S4(0);
            } NEXT_COLUMN(c, push.columns4);
        } else {
            uint from = id * push.columns4;
            FOR_COLUMNS(c, push.columns4) {
                push.operands.embedded.v[to + c] = store4(load4(push.operands.table.v[from + c]));
            } NEXT_COLUMN(c, push.columns4);
        }
    } NEXT_ROW(token, push.tokens);
}
