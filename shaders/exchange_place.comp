// SPDX-License-Identifier: MIT
// The routing part of received records whose rows are masked, those of local expert e from row
// e * spacing on in the order of the records: local expert id, weight and row of each choice, and
// how many rows each expert has. Choices of other experts get -1, 0 and -1, and so do those of an
// expert that the record has chosen before: an expert has room for a token once, and the first
// choice gets the weights of all.
//   words: records as words (include/exchange.glsl), of which ids first .. first + experts are local
//   topk_ids, slot_to_row [records, top_k] i32, topk_weights [records, top_k] f32,
//   counts [max(experts, 1)] u32
// A workgroup has an expert, each invocation a run of the records, so that order needs no atomics;
// and a share of what no expert has. One more workgroup has a share alone, as there may be no expert.
// Dispatch: experts + 1 workgroups, grid-stride. Shared: 4 * local_size bytes.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "exchange_place.kernel.glsl"

layout(local_size_x_id = 0) in;

const uint AT_ONCE = 8u; // loads that do not wait for each other

shared uint counts[local_size]; // rows of each run

uint lane = gl_LocalInvocationIndex;

uint ids_of(uint record) {
    return record * push.record_words + push.hidden_words;
}

uint id_at(uint at) {
    return push.operands.words.v[at];
}

// The first of a record's choices that is this one; top_k if none is.
uint first_choice(uint record, uint id) {
    uint ids = ids_of(record), found = push.top_k, first = 0u;
    do {
        uint some[AT_ONCE];
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            some[i] = id_at(ids + min(first + i, push.top_k - 1u));
        }
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            found = some[i] == id ? min(found, first + i) : found;
        }
        first += AT_ONCE;
    } while (first < push.top_k);
    return found;
}

float weight_of(uint record, uint id, uint choice) {
    uint ids = ids_of(record), weights = ids + push.top_k;
    float weight = uintBitsToFloat(push.operands.words.v[weights + choice]);
    for (uint other = choice + 1u; other < push.top_k; ++other) {
        if (id_at(ids + other) == id) {
            weight += uintBitsToFloat(push.operands.words.v[weights + other]);
        }
    }
    return weight;
}

uint rows_before() {
    uint sum = 0u;
    for (uint first = 0u; first < lane; first += AT_ONCE) {
        [[unroll]] for (uint i = 0u; i < AT_ONCE; ++i) {
            uint count = counts[min(first + i, local_size - 1u)];
            sum += first + i < lane ? count : 0u;
        }
    }
    return sum;
}

void place_rows(uint expert) {
    uint id = push.first + expert;
    uint run = div_up(push.records, local_size);
    uint first = min(lane * run, push.records), end = min(first + run, push.records);
    uint count = 0u;
    for (uint record = first; record < end; ++record) {
        count += first_choice(record, id) < push.top_k ? 1u : 0u;
    }
    counts[lane] = count;
    barrier();
    uint row = rows_before();
    if (lane == local_size - 1u) {
        push.operands.counts.v[expert] = row + count;
    }
    for (uint record = first; record < end; ++record) {
        uint choice = first_choice(record, id);
        if (choice < push.top_k) {
            uint slot = record * push.top_k + choice;
            push.operands.topk_ids.v[slot] = int(expert);
            push.operands.topk_weights.v[slot] = weight_of(record, id, choice);
            push.operands.slot_to_row.v[slot] = int(expert * push.spacing + row);
            ++row;
        }
    }
    barrier(); // all have read the counts
}

void leave_out(uint share) {
    uint slots = push.records * push.top_k, size = div_up(slots, push.experts + 1u);
    uint end = min((share + 1u) * size, slots);
    for (uint slot = share * size + lane; slot < end; slot += local_size) {
        uint record = slot / push.top_k, choice = slot % push.top_k;
        uint id = id_at(ids_of(record) + choice);
        if (id - push.first >= push.experts || first_choice(record, id) < choice) {
            push.operands.topk_ids.v[slot] = -1;
            push.operands.topk_weights.v[slot] = 0.0;
            push.operands.slot_to_row.v[slot] = -1;
        }
    }
}

void main() {
    for (uint expert = gl_WorkGroupID.x; expert <= push.experts; expert += gl_NumWorkGroups.x) {
        leave_out(expert);
        if (expert < push.experts) {
            place_rows(expert);
        } else if (expert == 0u && lane == 0u) {
            push.operands.counts.v[0] = 0u;
        }
    }
}
