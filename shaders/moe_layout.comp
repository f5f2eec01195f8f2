// SPDX-License-Identifier: MIT
// The placement of (token, k) slots in rows grouped by expert: a counting sort in the order (expert,
// slot), each expert's rows beginning at a multiple of `alignment`; and, if wanted, the work list of
// products over these groups (grouped_gemm_tiles.comp).
//   topk_ids [slots] i32, -1 or any id outside 0..experts-1: not here
//   token_count [1] u32, used if has_token_count: slots of later tokens are not here either
//   block_counts [blocks, experts] u32: slots of block b that go to expert e. COUNT writes them, or
//           whatever made the ids; unused when there is but one block
//   counts [experts] u32, offsets [experts + 1] u32: rows of each expert without padding, its first
//           row; the last offset is the number of rows in all
//   row_to_slot [capacity] i32, -1 in rows of padding and behind the last; slot_to_row [slots] i32,
//           -1 for "not here"
//   slot_values [slots] f32, row_values [capacity] f32, used if has_values: the value of each row's
//           slot, 0 in rows of padding
// A workgroup has a block of block_slots slots, in `parts` equal runs, each of which an invocation
// counts and places one slot after another with a counter of its own for each expert: their order
// needs no atomics, nor subgroups of any size.
// Constants  local_size  at least parts
//            parts       runs of a block
//            pairs       ceil(experts / 2): counters are halves of a word
// Dispatch   x = blocks: with one the placing variant alone, with more COUNT before it, unless what
//            made the ids has counted them.
//            Shared: 4 * pairs * (parts + 1) + 24 * pairs + 8 * local_size bytes; of COUNT 8 * pairs + 4.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "moe_layout.kernel.glsl"
#include "include/group_tiles.glsl"

layout(local_size_x_id = 0) in;

uint lane = gl_LocalInvocationIndex;
uint first_slot, end_slot, present_end; // of the block; slots from present_end on are not here

void take_block() {
    first_slot = gl_WorkGroupID.x * push.block_slots;
    end_slot = min(first_slot + push.block_slots, push.slots);
    present_end = end_slot;
    if (push.has_token_count != 0u) {
        present_end = min(end_slot, push.operands.token_count.v[0] * push.top_k);
    }
}

// Loads are in bounds even for slots that do not exist: see common.glsl.
uint near(uint slot) {
    return min(slot, max(push.slots, 1u) - 1u);
}
uint expert_of(uint slot) {
    uint expert = uint(push.operands.topk_ids.v[near(slot)]);
    return slot < present_end ? expert : 0xFFFFFFFFu;
}

#if COUNT

const uint counters = 2u * pairs;
#include "include/block_counts.glsl"

void main() {
    take_block();
    clear_counts();
    for (uint slot = first_slot + lane; slot < present_end; slot += local_size) {
        uint expert = expert_of(slot);
        if (expert < push.experts) {
            count(expert);
        }
    }
    barrier();
    for (uint expert = lane; expert < push.experts; expert += local_size) {
        push.operands.block_counts.v[gl_WorkGroupID.x * push.experts + expert] =
            block_counts[expert];
    }
}

#else

#define PITCH (parts + 1u)
const uint AT_ONCE = 8u; // loads that do not wait for each other

shared uint counters[pairs * PITCH];
shared uint before[2u * pairs]; // slots of an expert in the blocks before this one
shared uint in_all[2u * pairs];
shared uint starts[2u * pairs]; // row of the block's first slot of an expert
shared uvec2 sums[local_size];

uint counter_of(uint expert) {
    return expert / 2u * PITCH + lane;
}

void count_slots() {
    for (uint i = lane; i < pairs * PITCH; i += local_size) {
        counters[i] = 0u;
    }
    barrier();
    uint run = div_up(push.block_slots, parts);
    if (lane < parts) {
        uint first = 0u;
        do { // a test at the loop's head would read once more than it should: common.glsl
            uint experts[AT_ONCE];
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                uint slot = first_slot + lane * run + first + i;
                uint expert = expert_of(slot);
                experts[i] = first + i < run ? expert : 0xFFFFFFFFu;
            }
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                if (experts[i] < push.experts) {
                    counters[counter_of(experts[i])] += 1u << experts[i] % 2u * 16u;
                }
            }
            first += AT_ONCE;
        } while (first < run);
    }
    barrier();
    // Of each run those of the runs before it, behind the last those of all.
    for (uint pair = lane; pair < pairs; pair += local_size) {
        uint sum = 0u;
        for (uint first = 0u; first < PITCH; first += AT_ONCE) {
            uint part[AT_ONCE];
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                part[i] = counters[pair * PITCH + min(first + i, parts)];
            }
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                if (first + i <= parts) {
                    counters[pair * PITCH + first + i] = sum;
                }
                sum += part[i];
            }
        }
    }
    barrier();
}

uint count_in_block(uint expert) {
    return counters[expert / 2u * PITCH + parts] >> expert % 2u * 16u & 0xFFFFu;
}

// Finds before and in_all. The counts of all blocks follow each other: each invocation takes every
// local_size-th, and integer sums hide the order of the atomics.
void add_blocks() {
    for (uint expert = lane; expert < 2u * pairs; expert += local_size) {
        before[expert] = 0u;
        in_all[expert] = gl_NumWorkGroups.x == 1u ? count_in_block(expert) : 0u;
    }
    barrier();
    uint size = gl_NumWorkGroups.x > 1u ? gl_NumWorkGroups.x * push.experts : 0u;
    uint own = gl_WorkGroupID.x * push.experts;
    uint first = lane;
    if (first < size) {
        do {
            uint some[AT_ONCE];
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                uint at = first + i * local_size;
                uint found = push.operands.block_counts.v[min(at, size - 1u)];
                some[i] = at < size ? found : 0u;
            }
            [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
                uint at = first + i * local_size, expert = at % push.experts;
                if (some[i] > 0u) {
                    atomicAdd(in_all[expert], some[i]);
                    if (at < own) {
                        atomicAdd(before[expert], some[i]);
                    }
                }
            }
            first += AT_ONCE * local_size;
        } while (first < size);
    }
    barrier();
}

// sums[lane] = those of all invocations up to it, of the first `count`.
void add_up(uint count) {
    for (uint reach = 1u; reach < count; reach *= 2u) {
        barrier();
        uvec2 other = sums[lane - min(lane, reach)];
        other = lane >= reach ? other : uvec2(0u);
        barrier();
        sums[lane] += other;
    }
    barrier();
}

uint padded(uint rows) {
    return div_up(rows, push.alignment) * push.alignment;
}

// Finds where experts begin and, in the first block, tells; returns the number of rows.
uint place_experts() {
    add_blocks();
    uvec2 up_to = uvec2(0u); // rows and tiles
    uint first = 0u;
    do {
        uint expert = first + lane, count = min(push.experts - first, local_size);
        bool there = expert < push.experts;
        uint rows = there ? padded(in_all[expert]) : 0u;
        uint tiles = push.has_list != 0u ? div_up(rows, push.tile_rows) : 0u;
        sums[lane] = uvec2(rows, tiles);
        add_up(count);
        uvec2 begin = up_to + sums[lane] - uvec2(rows, tiles);
        up_to += sums[count - 1u];
        barrier();
        if (there) {
            starts[expert] = begin.x + before[expert];
            if (gl_WorkGroupID.x == 0u) {
                push.operands.counts.v[expert] = in_all[expert];
                push.operands.offsets.v[expert] = begin.x;
                write_group_tiles(expert, begin.x, begin.y, tiles);
            }
        }
        first += local_size;
    } while (first < push.experts);
    if (gl_GlobalInvocationID.x == 0u) {
        push.operands.offsets.v[push.experts] = up_to.x;
        if (push.has_list != 0u) {
            write_grids(up_to.y);
        }
    }
    barrier();
    return up_to.x;
}

// Rows of padding, an expert in each block in turn, and those behind the last.
void clear_rows(uint rows) {
    for (uint expert = gl_WorkGroupID.x; expert < push.experts; expert += gl_NumWorkGroups.x) {
        uint begin = starts[expert] - before[expert], count = in_all[expert];
        uint end = begin + padded(count);
        for (uint row = begin + count + lane; row < end; row += local_size) {
            push.operands.row_to_slot.v[row] = -1;
            if (push.has_values != 0u) {
                push.operands.row_values.v[row] = 0.0;
            }
        }
    }
    for (uint row = rows + gl_GlobalInvocationID.x; row < push.capacity;
         row += gl_NumWorkGroups.x * local_size) {
        push.operands.row_to_slot.v[row] = -1;
    }
}

void place_slots() {
    uint run = div_up(push.block_slots, parts);
    if (lane >= parts) {
        return;
    }
    uint first = 0u;
    do {
        uint experts[AT_ONCE];
        float values[AT_ONCE];
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            uint slot = first_slot + lane * run + first + i;
            uint expert = expert_of(slot);
            experts[i] = first + i < run ? expert : 0xFFFFFFFFu;
            values[i] = 0.0;
            if (push.has_values != 0u) {
                values[i] = push.operands.slot_values.v[near(slot)];
            }
        }
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            uint slot = first_slot + lane * run + first + i;
            int row = -1;
            if (experts[i] < push.experts) {
                uint at = counter_of(experts[i]), shift = experts[i] % 2u * 16u;
                uint counter = counters[at];
                counters[at] = counter + (1u << shift);
                row = int(starts[experts[i]] + (counter >> shift & 0xFFFFu));
                push.operands.row_to_slot.v[row] = int(slot);
                if (push.has_values != 0u) {
                    push.operands.row_values.v[row] = values[i];
                }
            }
            if (first + i < run && slot < end_slot) {
                push.operands.slot_to_row.v[slot] = row;
            }
        }
        first += AT_ONCE;
    } while (first < run);
}

void main() {
    take_block();
    count_slots();
    clear_rows(place_experts());
    place_slots();
}

#endif
