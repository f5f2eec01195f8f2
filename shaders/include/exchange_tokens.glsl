// SPDX-License-Identifier: MIT
// The tokens that a member of the exchange hands in, for kernels with the operands topk_ids and
// token_count, which push tokens, experts, ranks (of all members), ranks_per_member (a member is a
// rank, or the ranks of a node) and has_token_count. Included after the kernel's header.
#ifndef BELLOWS_EXCHANGE_TOKENS_GLSL
#define BELLOWS_EXCHANGE_TOKENS_GLSL

#include "exchange.glsl"

// How many there are: push.tokens or, if fewer, what the device says.
uint num_tokens() {
    uint tokens = push.tokens;
    if (push.has_token_count != 0u) {
        tokens = min(tokens, push.operands.token_count.v[0]);
    }
    return tokens;
}

uint member_of_expert(uint expert) {
    return rank_of_expert(expert, push.experts, push.ranks) / push.ranks_per_member;
}

// The member that owns the slot's expert; -1: none.
int destination(uint slot) {
    int expert = push.operands.topk_ids.v[slot];
    return expert < 0 || expert >= int(push.experts) ? -1 : int(member_of_expert(uint(expert)));
}

#endif
