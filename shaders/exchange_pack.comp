// SPDX-License-Identifier: MIT
// Records for the wire, grouped by destination rank: a token is read once and written to the record
// of each rank that it goes to, slot_to_row[token, k] of the first slot k that goes there, with
// (has_routing) which of that rank's experts it is for and their weights; (per_choice) of its slot's.
//   x [tokens, columns] of the variant's storage, or (bf16, wide 2) rows of any 16 bytes, x_units from
//   each other, token_count [1] u32, topk_ids [tokens, top_k] i32, topk_weights [tokens, top_k] f32,
//   slot_to_row [tokens, top_k] i32; records and words are the same memory, seen as units and as
//   words (include/exchange.glsl)
// Dispatch: a workgroup per token (include/rows.glsl), y = parts of a token (include/row_spread.glsl).
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "exchange_pack.kernel.glsl"
#include "include/exchange_tokens.glsl"
const uint row_per_workgroup = 1u;
#include "include/rows.glsl"
#include "include/row_spread.glsl"

// The experts [x, y) of the member that owns the slot's.
ivec2 experts_of(uint slot) {
    uint first = uint(destination(slot)) * push.ranks_per_member;
    return ivec2(first_expert(first, push.experts, push.ranks),
                 first_expert(first + push.ranks_per_member, push.experts, push.ranks));
}

// Choice k of a token in the record of `row`, which slot `of` has and the owner of `experts` gets.
void store_routing(uint row, ivec2 experts, uint of, uint token, uint k) {
    uint slot = token * push.top_k + k;
    int expert = push.operands.topk_ids.v[slot];
    bool here = expert >= experts.x && expert < experts.y && (push.per_choice == 0u || slot == of);
    uint to = row * push.record_words + push.hidden_words + k;
    push.operands.words.v[to] = here ? uint(expert - experts.x) : 0xFFFFFFFFu;
    push.operands.words.v[to + push.top_k] =
        here ? floatBitsToUint(push.operands.topk_weights.v[token * push.top_k + k]) : 0u;
}

void main() {
    uvec2 x = uvec2(push.operands.x), records = uvec2(push.operands.records);
    uint count = num_tokens();
    FOR_ROWS(token, count) {
        spread(x, token * push.x_units, records, push.record_units, token);
        if (push.has_routing != 0u && gl_WorkGroupID.y == 0u) {
            for (uint i = column_first(); i < push.top_k * push.top_k; i += column_step()) {
                uint slot = token * push.top_k + i / push.top_k;
                int row = push.operands.slot_to_row.v[slot];
                if (row >= 0) {
                    store_routing(uint(row), experts_of(slot), slot, token, i % push.top_k);
                }
            }
        }
    } NEXT_ROW(token, count);
}
