// SPDX-License-Identifier: MIT
// d_table[id] += sum over the tokens t with ids[t] == id, ascending, of d_out[t]. The first token
// of each id walks the chain that embedding_links.comp made.
//   ids, next, has_previous [tokens] u32, d_out [tokens, columns], d_table [vocab, columns] f32
// Dispatch: see include/rows.glsl; a row is a token.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "embedding_wgrad.kernel.glsl"
#include "include/rows.glsl"

// Adds the rows of the chain that begins at `token` to row `id` of the table. Four groups of
// columns at a time share the walk.
void add_chain(uint token, uint id) {
    uint step = column_step();
    uint to = id * push.columns4;
    for (uint first = column_first(); first < push.columns4; first += 4u * step) {
        vec4 sum[4];
        [[unroll]] for (uint j = 0u; j < 4u; ++j) {
            uint c = first + j * step;
            sum[j] = vec4(0);
            if (c < push.columns4) {
                sum[j] = push.operands.d_table.v[to + c];
            }
        }
        uint t = token;
        do {
            [[unroll]] for (uint j = 0u; j < 4u; ++j) {
                uint c = first + j * step;
                if (c < push.columns4) {
                    sum[j] += load4(push.operands.d_out.v[t * push.columns4 + c]);
                }
            }
        } while ((t = push.operands.next.v[t]) < push.tokens);
        [[unroll]] for (uint j = 0u; j < 4u; ++j) {
            uint c = first + j * step;
            if (c < push.columns4) {
                push.operands.d_table.v[to + c] = sum[j];
            }
        }
    }
}

void main() {
    FOR_ROWS(token, push.tokens) {
        uint id = push.operands.ids.v[token];
        if (push.operands.has_previous.v[token] == 0u && id < push.vocab) {
            add_chain(token, id);
        }
    } NEXT_ROW(token, push.tokens);
}
