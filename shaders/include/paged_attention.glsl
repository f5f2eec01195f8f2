// SPDX-License-Identifier: MIT
// What the kernels of attention over a paged cache share. Queries and results are fours of elements
// with row and head strides; a pair is a row and one of the heads of queries that use a head of keys.
//   q [rows, heads, 4 * key4], o [rows, heads, 4 * value4] f32 or bf16 (variant)
//   cache    blocks of kCacheBlock entries (paged_entry.glsl) of `units` times 16 bytes
//   items    u32: their number, then from word 8 on for each item 8 words: first row, rows, sequence,
//            keys that the first row sees (each further row sees one more), first block, end of the
//            blocks, first partial result, partial results from one row to the next
//   parts    [rows, 2] u32: first partial result, number of them; of one part the result is final
//   tables   [sequences, table_blocks] u32: the blocks that hold a sequence's keys
//   partial  [partials, heads, 4 * value4] f32, partial_lse [partials, heads] f32, base 2
//   lse      [rows, heads] f32, natural, where has_lse
// Constants  key4, value4   fours of a key and of a value
//            first_value4   where values begin in an entry, in fours: 0 of a latent, whose values are
//                           the beginning of the keys
//            kv_heads, group: heads of keys, and of queries to each of them
//            chunks         parts of a row's pairs that workgroups share out
// Tasks are items x kv_heads x chunks, grid-stride. Keys are taken in ascending order. What a row
// does not see enters none of its sums, so its bits depend on its own query and keys alone.
#ifndef BELLOWS_PAGED_ATTENTION_GLSL
#define BELLOWS_PAGED_ATTENTION_GLSL

#include "paged_entry.glsl"

const float kLog2E = 1.4426950408889634;
const float kLn2 = 0.6931471805599453;
const float kLowest = -3.0e38;

struct Item {
    uint row, rows, sequence, keys, first_block, end_block, partial, partial_step;
};

Item load_item(uint index) {
    uint at = 8u * (index + 1u);
    Item item;
    item.row = push.operands.items.v[at];
    item.rows = push.operands.items.v[at + 1u];
    item.sequence = push.operands.items.v[at + 2u];
    item.keys = push.operands.items.v[at + 3u];
    item.first_block = push.operands.items.v[at + 4u];
    item.end_block = push.operands.items.v[at + 5u];
    item.partial = push.operands.items.v[at + 6u];
    item.partial_step = push.operands.items.v[at + 7u];
    return item;
}

uint num_tasks() {
    return min(push.operands.items.v[0], push.max_items) * (kv_heads * chunks);
}

// Keys that some row of the item sees.
uint keys_of(Item item) {
    return item.keys + item.rows - 1u;
}

uvec2 block_address(Item item, uint block) {
    uint at = push.operands.tables.v[item.sequence * push.table_blocks + block];
    return address_add(uvec2(push.operands.cache), at, kCacheBlock * units, 4u);
}

uvec2 entry_address(uvec2 block, uint token) {
    uint carry, low = uaddCarry(block.x, 16u * units * token, carry);
    return uvec2(low, block.y + carry);
}

// Where the results of a row of an item and a head go.
struct Target {
    bool final_result;
    uint at; // fours of o or of the partial results
};

Target target_of(Item item, uint row, uint head) {
    bool final = push.operands.parts.v[2u * (item.row + row) + 1u] == 1u;
    uint partial = item.partial + row * item.partial_step;
    return Target(final, final ? (item.row + row) * push.o_row4 + head * push.o_head4
                               : (partial * push.heads + head) * value4);
}

void store_result(Target target, uint column4, vec4 x) {
    if (target.final_result) {
        push.operands.o.v[target.at + column4] = store4(x);
    } else {
        push.operands.partial.v[target.at + column4] = x;
    }
}

// log_sum: base 2.
void store_lse(Item item, Target target, uint row, uint head, float log_sum) {
    if (!target.final_result) {
        push.operands.partial_lse.v[target.at / value4] = log_sum;
    } else if (push.has_lse != 0u) {
        push.operands.lse.v[(item.row + row) * push.heads + head] = log_sum * kLn2;
    }
}

// What sums up to the largest score `top` count for where it is new_top.
float fade(float top, float new_top) {
    return top == new_top ? 1.0 : exp2(top - new_top);
}

#endif
