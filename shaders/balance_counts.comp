// SPDX-License-Identifier: MIT
// What balance losses count of each run of run_tokens tokens; counts is added to:
//   counts [runs, run_counts] u32, of a run in this order
//     [experts]  tokens that have the expert among their top_k: of the scores alone (of_scores;
//                ties to the lower expert, NaN after every number), or of topk_ids
//     [devices]  slots of topk_ids whose expert is of the device; devices are equal runs of experts
//     [devices]  tokens of which some slot's is
//     [1]        (count_tokens) tokens; there is one run then
//   scores [tokens, experts] f32, topk_ids [tokens, top_k] i32; ids outside 0..experts-1 count nowhere
// Integer sums: the order of the atomics is invisible.
// Dispatch: see include/rows.glsl; a row is a token, its columns the experts, then the slots.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "balance_counts.kernel.glsl"
#include "include/rows.glsl"

float score_of(uint at) {
    float score = push.operands.scores.v[at];
    return is_nan(score) ? uintBitsToFloat(0xFF800000u) : score;
}

// By a workgroup: each of its invocations ranks some of the experts.
void count_ranked(uint token, uint first) {
    uint row = token * push.experts;
    FOR_COLUMNS(e, push.experts) {
        float own = score_of(row + e);
        uint rank = 0u;
        FOR_COUNTED(other, 0u, push.experts) {
            float score = score_of(row + other);
            rank += score > own || (score == own && other < e) ? 1u : 0u;
        } NEXT_COUNTED(other, push.experts, 1u);
        if (rank < push.top_k) {
            atomicAdd(push.operands.counts.v[first + e], 1u);
        }
    } NEXT_COLUMN(e, push.experts);
}

// By one invocation: the highest score, then the highest behind it, and so on.
void count_highest(uint token, uint first) {
    uint row = token * push.experts, last_at = 0u;
    float last = 0.0;
    FOR_COUNTED(k, 0u, push.top_k) {
        uint at = push.experts;
        float best = 0.0;
        FOR_COUNTED(e, 0u, push.experts) {
            float score = score_of(row + e);
            bool behind = k == 0u || score < last || (score == last && e > last_at);
            if (behind && (at == push.experts || score > best)) {
                best = score;
                at = e;
            }
        } NEXT_COUNTED(e, push.experts, 1u);
        atomicAdd(push.operands.counts.v[first + min(at, push.experts - 1u)], 1u);
        last = best;
        last_at = at;
    } NEXT_COUNTED(k, push.top_k, 1u);
}

// Whether an earlier slot of the token went to the device, too.
bool went_before(uint first_slot, uint slot, uint device, uint size) {
    bool before = false;
    FOR_COUNTED(earlier, first_slot, slot) {
        uint expert = uint(push.operands.topk_ids.v[earlier]);
        before = before || (expert < push.experts && expert / size == device);
    } NEXT_COUNTED(earlier, slot, 1u);
    return before;
}

void count_slots(uint token, uint first) {
    uint first_slot = token * push.top_k;
    uint size = push.experts / max(push.devices, 1u);
    FOR_COLUMNS(k, push.top_k) {
        uint slot = first_slot + k;
        uint expert = uint(push.operands.topk_ids.v[slot]);
        if (expert < push.experts) {
            if (of_scores == 0u) {
                atomicAdd(push.operands.counts.v[first + expert], 1u);
            }
            if (push.devices != 0u) {
                uint device = expert / size;
                uint at = first + push.experts + device;
                atomicAdd(push.operands.counts.v[at], 1u);
                if (!went_before(first_slot, slot, device, size)) {
                    atomicAdd(push.operands.counts.v[at + push.devices], 1u);
                }
            }
        }
    } NEXT_COLUMN(k, push.top_k);
}

void main() {
    if (count_tokens != 0u && gl_GlobalInvocationID.x == 0u) {
        atomicAdd(push.operands.counts.v[push.run_counts - 1u], push.tokens);
    }
    FOR_ROWS(token, push.tokens) {
        uint first = token / push.run_tokens * push.run_counts;
        if (of_scores != 0u && row_per_workgroup != 0u) {
            count_ranked(token, first);
        } else if (of_scores != 0u) {
            count_highest(token, first);
        }
        if (of_scores == 0u || push.devices != 0u) {
            count_slots(token, first);
        }
    } NEXT_ROW(token, push.tokens);
}
