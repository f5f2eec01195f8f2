// SPDX-License-Identifier: MIT
// Where each token goes: rank_ids[t, k] says which rank, or node (include/exchange_tokens.glsl), owns
// expert topk_ids[t, k] if no earlier slot of the token goes there, else it is -1; so a token travels
// once to each: its route, owner * num_origins + the origin of the token. spacing not 0: the token's
// row among the records of all ranks, owner * spacing + t. per_choice 1: each slot goes there for
// itself, with spacing unless an earlier one has the same expert.
//   topk_ids, rank_ids [tokens, top_k] i32; ids outside 0..experts-1 go nowhere
//   token_count [1] u32; origins [num_origins] u32, the first token of each, not read if it is one
//   route_counts [blocks, routes] and loads [blocks, experts] u32, where `counters` is not 0: slots of
//           block b, of block_slots each, that go a route, as moe_layout.comp wants it; and that
//           choose an expert
// Constants  counters     routes + experts, or 0: nothing is counted
// Dispatch: a workgroup per block, grid-stride. Shared: 4 * (counters + 1) bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_route.kernel.glsl"
#include "include/exchange_tokens.glsl"

layout(local_size_x_id = 0) in;
#include "include/block_counts.glsl"

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

// A member's experts: first to end, exclusive.
bool earlier_goes_there(uint first, uint k, int member) {
    if (push.per_choice != 0u && push.spacing == 0u) {
        return false;
    }
    uint rank = uint(member) * push.ranks_per_member;
    int begin = int(first_expert(rank, push.experts, push.ranks));
    int end = int(first_expert(rank + push.ranks_per_member, push.experts, push.ranks));
    int own = push.operands.topk_ids.v[first + k];
    bool goes = false;
    for (uint earlier = 0u; earlier < k; ++earlier) {
        int expert = push.operands.topk_ids.v[first + earlier];
        goes = goes || (push.per_choice != 0u ? expert == own : expert >= begin && expert < end);
    }
    return goes;
}

void route(uint slot) {
    uint token = slot / push.top_k, k = slot % push.top_k;
    int member = destination(slot);
    if (counters > 0u && member >= 0) {
        count(push.routes + uint(push.operands.topk_ids.v[slot]));
    }
    if (member >= 0 && earlier_goes_there(slot - k, k, member)) {
        member = -1;
    }
    if (member >= 0) {
        member = push.spacing != 0u ? member * int(push.spacing) + int(token)
                                    : member * int(push.num_origins) + int(origin_of(token));
        if (counters > 0u) {
            count(uint(member));
        }
    }
    push.operands.rank_ids.v[slot] = member;
}

void main() {
    uint slots = num_tokens() * push.top_k;
    for (uint block = gl_WorkGroupID.x; block < push.blocks; block += gl_NumWorkGroups.x) {
        clear_counts();
        uint slot = block * push.block_slots + gl_LocalInvocationIndex;
        uint end = min((block + 1u) * push.block_slots, slots);
        if (slot < end) {
            do {
                route(slot);
            } while ((slot += local_size) < end);
        }
        barrier();
        for (uint i = gl_LocalInvocationIndex; i < counters; i += local_size) {
            if (i < push.routes) {
                push.operands.route_counts.v[block * push.routes + i] = block_counts[i];
            } else {
                push.operands.loads.v[block * push.experts + i - push.routes] = block_counts[i];
            }
        }
    }
}
