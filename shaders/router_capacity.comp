// SPDX-License-Identifier: MIT
// Choices beyond what a group of experts has room for are dropped: kept_ids is topk_ids, or -1 for a
// slot whose group has `capacity` slots that go before it. Slots go by the scores of their tokens for
// their experts, the higher first, NaN last; the lower slot first among equals. Slots of spared runs
// go before all others and are never dropped.
//   scores [tokens, experts] f32, topk_ids, kept_ids [tokens, top_k] i32; ids outside 0..experts-1
//   are in no group
//   spared [runs] u32: not 0 for runs of run_slots slots that are; run_slots 0: none is, it is not read
// A workgroup has a group of experts and looks for the last slot that is kept, by radix select: a
// slot's key are the bits of its score, in an order of integers, and behind them its number from the
// end. Each pass counts the next digit of keys that agree with what is known, then one invocation
// takes the digit of the last slot with room. It ends when all slots that agree are kept: after two
// or three passes of six, but for ties. Integer sums: the order of the atomics is invisible.
// Dispatch: a workgroup per group, grid-stride. Shared memory: 8.3 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "router_capacity.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint kDigits = 2048u; // of 11 bits
const uint kRun = 32u;      // digits that are summed first
const uint kPasses = 6u;    // 11, 11, 10 bits of the score, as many of the slot

shared uint counts[kDigits], run_counts[kDigits / kRun];
shared uint spared_slots;
shared uvec2 found;  // the known digits of the last kept slot's key, zeros behind them
shared uint room;    // slots that are kept of those that agree with them
shared uint is_found; // the slots from `found` on are those that are kept

uint lane = gl_LocalInvocationIndex;

// Loads that do not wait for each other.
const uint AT_ONCE = 4u;
uint slots[AT_ONCE], experts[AT_ONCE];
uvec2 keys[AT_ONCE]; // of slots of the group
bool in_group[AT_ONCE];

// Higher for slots that go first.
uvec2 key_of(uint slot, float score) {
    uint bits = floatBitsToUint(score);
    uint size = bits & 0x7FFFFFFFu;
    bits = size > 0x7F800000u ? 0xFF800000u : size == 0u ? 0u : bits;
    uint ordered = (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
    return uvec2(ordered, ~slot);
}

// From `first` on, local_size from one to the next. Behind the last there are none of the group.
void load_slots(uint first, uint first_expert) {
    [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
        slots[i] = first + i * local_size;
        experts[i] = uint(push.operands.topk_ids.v[min(slots[i], push.slots - 1u)]);
    }
    float scores[AT_ONCE];
    [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
        in_group[i] =
            slots[i] < push.slots && experts[i] - first_expert < push.group_experts;
        scores[i] = 0.0;
        if (in_group[i]) {
            scores[i] = push.operands.scores.v[slots[i] / push.top_k * push.experts + experts[i]];
        }
    }
    [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
        keys[i] = key_of(slots[i], scores[i]);
    }
}

bool is_spared(uint slot) {
    bool spared = false;
    if (push.run_slots != 0u) {
        spared = push.operands.spared.v[slot / push.run_slots] != 0u;
    }
    return spared;
}

// A pass looks at the digit from bit `shift` on of one half of a key.
uint half_of(uvec2 key, uint pass) {
    return pass < 3u ? key.x : key.y;
}
uint shift_of(uint pass) {
    uint third = pass % 3u;
    return third == 0u ? 21u : third == 1u ? 10u : 0u;
}
uint width_of(uint pass) {
    return pass % 3u == 2u ? 10u : 11u;
}

// Whether the digits ahead of this pass are those that were found.
bool agrees(uvec2 key, uvec2 known, uint pass) {
    uint above = shift_of(pass) + width_of(pass); // 32 in a half's first pass
    uint differing = half_of(key, pass) ^ half_of(known, pass);
    bool same = above >= 32u || (differing >> (above & 31u)) == 0u;
    return same && (pass < 3u || key.x == known.x);
}

void clear_digits() {
    for (uint digit = lane; digit < kDigits; digit += local_size) {
        counts[digit] = 0u;
    }
    barrier();
}

void count_digits(uint first_expert, uvec2 known, uint pass) {
    uint mask = (1u << width_of(pass)) - 1u;
    for (uint first = lane; first < push.slots; first += AT_ONCE * local_size) {
        load_slots(first, first_expert);
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            bool spared = in_group[i] && is_spared(slots[i]);
            if (spared && pass == 0u) {
                atomicAdd(spared_slots, 1u);
            }
            if (in_group[i] && !spared && agrees(keys[i], known, pass)) {
                atomicAdd(counts[(half_of(keys[i], pass) >> shift_of(pass)) & mask], 1u);
            }
        }
    }
    barrier();
    for (uint run = lane; run < kDigits / kRun; run += local_size) {
        uint sum = 0u;
        for (uint i = 0u; i < kRun; ++i) {
            sum += counts[run * kRun + (i + run) % kRun]; // of another bank each
        }
        run_counts[run] = sum;
    }
    barrier();
}

// By one invocation: the highest digits go first.
void take_digit(uint pass) {
    uint left = room;
    if (pass == 0u) {
        left = push.capacity - min(spared_slots, push.capacity);
    }
    if (left == 0u) { // no key is as high
        found = uvec2(0xFFFFFFFFu);
        is_found = 1u;
    } else {
        uint run = kDigits / kRun - 1u;
        while (run > 0u && run_counts[run] < left) {
            left -= run_counts[run];
            --run;
        }
        uint digit = run * kRun + kRun - 1u;
        while (digit > run * kRun && counts[digit] < left) {
            left -= counts[digit];
            --digit;
        }
        if (pass < 3u) {
            found.x |= digit << shift_of(pass);
        } else {
            found.y |= digit << shift_of(pass);
        }
        room = left;
        is_found = counts[digit] <= left ? 1u : 0u; // fewer: in all there are not as many
    }
}

void mark(uint group, uint first_expert) {
    uvec2 last = found;
    for (uint first = lane; first < push.slots; first += AT_ONCE * local_size) {
        load_slots(first, first_expert);
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            if (in_group[i]) {
                bool kept = keys[i].x > last.x || (keys[i].x == last.x && keys[i].y >= last.y) ||
                            is_spared(slots[i]);
                push.operands.kept_ids.v[slots[i]] = kept ? int(experts[i]) : -1;
            } else if (group == 0u && slots[i] < push.slots && experts[i] >= push.experts) {
                push.operands.kept_ids.v[slots[i]] = -1;
            }
        }
    }
}

void main() {
    uint groups = push.experts / push.group_experts;
    for (uint group = gl_WorkGroupID.x; group < groups; group += gl_NumWorkGroups.x) {
        uint first_expert = group * push.group_experts;
        barrier(); // all have marked those of the group before
        if (lane == 0u) {
            spared_slots = 0u;
            found = uvec2(0u);
            is_found = 0u;
        }
        barrier();
        for (uint pass = 0u; pass < kPasses && is_found == 0u; ++pass) {
            uvec2 known = found;
            clear_digits();
            count_digits(first_expert, known, pass);
            if (lane == 0u) {
                take_digit(pass);
            }
            barrier();
        }
        mark(group, first_expert);
    }
}
