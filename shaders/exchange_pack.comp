// SPDX-License-Identifier: MIT
// Records for the wire, grouped by destination rank: row r holds the token of slot row_to_slot[r],
// and (has_routing) which of that rank's experts it goes to, with the routing weights.
//   x [tokens, columns] of the variant's storage, topk_ids [tokens, top_k] i32, topk_weights
//   [tokens, top_k] f32, row_to_slot [rows] i32, row_count [1] u32; records and words are
//   the same memory, seen as groups of four elements and as words (include/exchange.glsl)
// Dispatch: see include/rows.glsl; a row is a record.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/activation.glsl"
#include "include/exchange.glsl"
#include "exchange_pack.kernel.glsl"
#include "include/rows.glsl"

void main() {
    uint rows = min(push.rows, push.operands.row_count.v[0]);
    FOR_ROWS(row, rows) {
        uint slot = uint(push.operands.row_to_slot.v[row]);
        uint token = slot / push.top_k;
        FOR_COLUMNS(c, push.columns4) {
            push.operands.records.v[row * push.record4 + c] =
                push.operands.x.v[token * push.columns4 + c];
        } NEXT_COLUMN(c, push.columns4);
        if (push.has_routing != 0u && row_leader()) {
            int mine = push.operands.topk_ids.v[slot];
            uint rank = rank_of_expert(uint(mine), push.experts, push.ranks);
            int first = int(first_expert(rank, push.experts, push.ranks));
            int end = int(first_expert(rank + 1u, push.experts, push.ranks));
            uint to = row * push.record_words + push.hidden_words;
            uint k = 0u;
            do {
                int expert = push.operands.topk_ids.v[token * push.top_k + k];
                bool here = expert >= first && expert < end;
                push.operands.words.v[to + k] = here ? uint(expert - first) : 0xFFFFFFFFu;
                push.operands.words.v[to + push.top_k + k] =
                    here ? floatBitsToUint(
                               push.operands.topk_weights.v[token * push.top_k + k])
                         : 0u;
            } while (++k < push.top_k);
        }
    } NEXT_ROW(row, rows);
}
