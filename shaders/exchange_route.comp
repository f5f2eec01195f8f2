// SPDX-License-Identifier: MIT
// The ranks that each token goes to: rank_ids[t, k] is the rank that owns expert topk_ids[t, k] if
// no earlier slot of the token goes there, else -1; so a token travels once per rank. spacing not 0:
// the token's row among the records of all ranks, rank * spacing + t, in place of the rank.
//   topk_ids, rank_ids [tokens, top_k] i32; ids outside 0..experts-1 go nowhere
// Dispatch: one invocation per token, grid-stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/exchange.glsl"
#include "exchange_route.kernel.glsl"

layout(local_size_x_id = 0) in;

int destination(uint slot) {
    int expert = push.operands.topk_ids.v[slot];
    return expert < 0 || expert >= int(push.experts)
               ? -1
               : int(rank_of_expert(uint(expert), push.experts, push.ranks));
}

void main() {
    uint token = gl_GlobalInvocationID.x;
    if (token >= push.tokens) {
        return;
    }
    do {
        uint first = token * push.top_k;
        uint k = 0u;
        do {
            int rank = destination(first + k);
            for (uint earlier = 0u; earlier < k && rank >= 0; ++earlier) {
                if (destination(first + earlier) == rank) {
                    rank = -1;
                }
            }
            bool placed = push.spacing != 0u && rank >= 0;
            push.operands.rank_ids.v[first + k] =
                placed ? rank * int(push.spacing) + int(token) : rank;
        } while (++k < push.top_k);
    } while ((token += gl_NumWorkGroups.x * local_size) < push.tokens);
}
