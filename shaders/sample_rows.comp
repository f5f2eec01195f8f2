// SPDX-License-Identifier: MIT
// The end of ops::sample: a workgroup per row puts together what sample_chunks left of the row's
// chunks, and where the row has thresholds finds them with the bins of sample_bins and draws.
// Dispatch: grid-stride over rows. Shared memory: 11.4 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "sample_rows.kernel.glsl"
#include "include/sampling.glsl"

const uint kBadKey = 0xFFFFFFFFu; // above all numbers and +inf

float row_most, row_log_sum; // of the logits as they came
bool row_bad;                // no token can be drawn, no probability is known

float log_prob_of(float logit) {
    precise float result = (logit - row_most) - row_log_sum;
    return row_bad ? kNan : result;
}

uvec2 candidate(uint base, uint i) {
    uint at = 2u * ((base + i / push.top_n) * kMostTop + i % push.top_n);
    return uvec2(push.operands.tops.v[at], push.operands.tops.v[at + 1u]);
}

void keep_candidate(uint at, uint key, uint id) {
    push.operands.top_tokens.v[at] = row_bad ? kNoToken : id;
    push.operands.top_log_probs.v[at] = log_prob_of(value_of(key));
}

#include "include/sampling_top.glsl"
#include "include/sampling_cut.glsl"

// The chunks' records: statistics of the logits, the best token's key and id.
void merge_chunks(uint row, out uint key, out uint id) {
    uint first = row * push.chunks;
    uint most_key = 0u, none = 0u;
    key = 0u;
    id = kNoToken;
    FOR_COUNTED(c, gl_LocalInvocationIndex, push.chunks) {
        uint at = (first + c) * kRecord;
        uint chunk_key = key_of(uintBitsToFloat(push.operands.records.v[at + kRecordMost]));
        bool bad = push.operands.records.v[at + kRecordBad] != 0u;
        most_key = bad ? kBadKey : max(most_key, chunk_key);
        take_better(key, id, push.operands.records.v[at + kRecordBestKey],
                    push.operands.records.v[at + kRecordBestId]);
    } NEXT_COUNTED(c, push.chunks, local_size);
    workgroup_best(key, id);
    workgroup_best(most_key, none);
    row_most = value_of(most_key);
    uvec2 sum = uvec2(0u);
    FOR_COUNTED(c, gl_LocalInvocationIndex, push.chunks) {
        uint at = (first + c) * kRecord;
        float most = uintBitsToFloat(push.operands.records.v[at + kRecordMost]);
        if (!is_forbidden(most)) {
            precise float below = most - row_most;
            precise float part = from_fixed40(uvec2(push.operands.records.v[at + kRecordSum],
                                                    push.operands.records.v[at + kRecordSum + 1u]));
            part = part * exp_f32(below);
            sum = add64(sum, fixed40(part));
        }
    } NEXT_COUNTED(c, push.chunks, local_size);
    sum = workgroup_sum(sum);
    row_bad = most_key == kBadKey || (sum.x | sum.y) == 0u;
    row_log_sum = row_bad ? 0.0 : log_f32(from_fixed40(sum));
}

void main() {
    FOR_COUNTED(row, gl_WorkGroupID.x, push.rows) {
        Settings s = settings_of(row);
        uint key, id;
        merge_chunks(row, key, id);
        top_candidates(row * push.chunks, push.chunks * push.top_n, push.top_n, row * push.top_n);
        if (s.cut && !row_bad && key != 0u) {
            draw_within_cuts(row, s, value_of(key), key, id);
        }
        if (gl_LocalInvocationIndex == 0u) {
            bool none = row_bad || key == 0u;
            push.operands.tokens.v[row] = none ? kNoToken : id;
            float result = kNan;
            if (!none) {
                result = log_prob_of(push.operands.logits.v[row * push.stride + id]);
            }
            push.operands.log_probs.v[row] = result;
        }
    } NEXT_COUNTED(row, push.rows, gl_NumWorkGroups.x);
}
