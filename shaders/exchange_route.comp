// SPDX-License-Identifier: MIT
// Where each token goes: rank_ids[t, k] says which rank, or node (include/exchange_tokens.glsl), owns
// expert topk_ids[t, k] if no earlier slot of the token goes there, else it is -1; so a token travels
// once to each: owner * num_origins + the origin of the token. spacing not 0: the token's row among
// the records of all ranks, owner * spacing + t.
//   topk_ids, rank_ids [tokens, top_k] i32; ids outside 0..experts-1 go nowhere
//   token_count [1] u32; origins [num_origins] u32, the first token of each, not read if it is one
// Dispatch: one invocation per token, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_route.kernel.glsl"
#include "include/exchange_tokens.glsl"

layout(local_size_x_id = 0) in;

// Which of the origins token belongs to: they follow each other, origins[i] is the first of i.
uint origin_of(uint token) {
    uint origin = 0u;
    FOR_COUNTED(i, 1u, push.num_origins) {
        if (token >= push.operands.origins.v[i]) {
            origin = i;
        }
    } NEXT_COUNTED(i, push.num_origins, 1u);
    return origin;
}

void main() {
    uint token = gl_GlobalInvocationID.x, tokens = num_tokens();
    if (token >= tokens) {
        return;
    }
    do {
        uint first = token * push.top_k, origin = origin_of(token);
        uint k = 0u;
        do {
            int rank = destination(first + k);
            for (uint earlier = 0u; earlier < k && rank >= 0; ++earlier) {
                if (destination(first + earlier) == rank) {
                    rank = -1;
                }
            }
            if (rank >= 0) {
                rank = push.spacing != 0u ? rank * int(push.spacing) + int(token)
                                          : rank * int(push.num_origins) + int(origin);
            }
            push.operands.rank_ids.v[first + k] = rank;
        } while (++k < push.top_k);
    } while ((token += gl_NumWorkGroups.x * local_size) < tokens);
}
