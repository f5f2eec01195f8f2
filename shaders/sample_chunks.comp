// SPDX-License-Identifier: MIT
// The beginning of ops::sample: a workgroup takes kChunk columns of a row, changes their logits by
// penalties, bias and the mask of allowed tokens, and leaves a record (include/sampling.glsl): the
// greatest logit, the sum of powers, the best token. That is the likeliest one for rows that take
// the likeliest or have thresholds, the one with the best score where the draw is from all tokens.
// The changed logits of rows with thresholds go to `changed` [rows, stride of whole fours], filled
// up with -inf, and their bins are cleared; the likeliest push.top_n tokens by the logits as they
// came go to `tops`.
//   logits [rows, vocabulary]; settings, history, biases: bellows::ops::SampleSettings, …
// Dispatch: grid-stride over rows * chunks workgroups. Shared memory: 8.3 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "sample_chunks.kernel.glsl"
#include "include/sampling.glsl"
#include "include/sampling_bins.glsl"

shared float shared_changed[kChunk];
shared uint shared_bad;

uvec2 candidate(uint base, uint i) {
    return uvec2(key_of(push.operands.logits.v[base + i]), i);
}

// `at` counts by candidates; ids are those of the row.
void keep_candidate(uint at, uint key, uint id) {
    uint chunk = at / kMostTop % push.chunks;
    push.operands.tops.v[2u * at] = key;
    push.operands.tops.v[2u * at + 1u] = key == 0u ? kNoToken : chunk * kChunk + id;
}

#include "include/sampling_top.glsl"

bool is_allowed(uint token) {
    return push.has_allowed == 0u ||
           (push.operands.allowed.v[token / 32u] >> token % 32u & 1u) != 0u;
}

// The logits as they came: masked into shared memory, their maximum returned.
float load_chunk(uint base, uint first, uint count) {
    uint lane = gl_LocalInvocationIndex;
    uint key = 0u, id = 0u;
    barrier();
    if (lane == 0u) {
        shared_bad = 0u;
    }
    barrier();
    bool bad = false;
    FOR_COUNTED(i, lane, count) {
        float x = push.operands.logits.v[base + i];
        bad = bad || is_bad(x);
        key = max(key, key_of(x));
        shared_changed[i] = is_allowed(first + i) ? x : -kInfinity;
    } NEXT_COUNTED(i, count, local_size);
    if (bad) {
        shared_bad = 1u;
    }
    workgroup_best(key, id);
    return value_of(key);
}

// Each token stands in a row's entries once, so no two invocations change the same one.
void change_logits(uint row, uint first, uint count) {
    uint at = 16u * row;
    float repetition = uintBitsToFloat(push.operands.settings.v[at + 4u]);
    float frequency = uintBitsToFloat(push.operands.settings.v[at + 5u]);
    float presence = uintBitsToFloat(push.operands.settings.v[at + 6u]);
    uint from = min(push.operands.settings.v[at + 10u], push.history_capacity);
    uint end = from + min(push.operands.settings.v[at + 11u], push.history_capacity - from);
    FOR_COUNTED(h, from + gl_LocalInvocationIndex, end) {
        uint i = push.operands.history.v[2u * h] - first;
        uint times = push.operands.history.v[2u * h + 1u];
        if (i < count) {
            precise float x = shared_changed[i];
            x = x > 0.0 ? x / repetition : x * repetition;
            x = x - float(times) * frequency;
            x = x - (times > 0u ? presence : 0.0);
            shared_changed[i] = x;
        }
    } NEXT_COUNTED(h, end, local_size);
    barrier();
    from = min(push.operands.settings.v[at + 12u], push.bias_capacity);
    end = from + min(push.operands.settings.v[at + 13u], push.bias_capacity - from);
    FOR_COUNTED(b, from + gl_LocalInvocationIndex, end) {
        uint i = push.operands.biases.v[2u * b] - first;
        if (i < count) {
            shared_changed[i] += uintBitsToFloat(push.operands.biases.v[2u * b + 1u]);
        }
    } NEXT_COUNTED(b, end, local_size);
    barrier();
}

uvec2 sum_powers(uint base, uint count, float most) {
    uvec2 sum = uvec2(0u);
    if (!is_forbidden(most) && !is_bad(most)) {
        FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
            precise float below = push.operands.logits.v[base + i] - most;
            sum = add64(sum, fixed40(exp_f32(below)));
        } NEXT_COUNTED(i, count, local_size);
    }
    return workgroup_sum(sum);
}

void choose(uint row, uint first, uint count, Settings s, out uint key, out uint id) {
    key = 0u;
    id = kNoToken;
    bool drawn = !s.greedy && !s.cut;
    FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
        float x = shared_changed[i];
        if (is_bad(x)) {
            shared_bad = 1u;
        } else if (!is_forbidden(x)) {
            take_better(key, id, key_of(drawn ? score(s, first + i, x) : x), first + i);
        }
    } NEXT_COUNTED(i, count, local_size);
    if (s.cut) {
        FOR_COUNTED(j, gl_LocalInvocationIndex, 4u * div_up(count, 4u)) {
            push.operands.changed.v[row * push.changed_stride + first + j] =
                j < count ? shared_changed[j] : -kInfinity;
        } NEXT_COUNTED(j, 4u * div_up(count, 4u), local_size);
    }
    workgroup_best(key, id);
}

void clear_bins(uint row) {
    FOR_COUNTED(b, gl_LocalInvocationIndex, kList) {
        push.operands.bins.v[row * kBinWords + b] = 0u;
    } NEXT_COUNTED(b, kList, local_size);
}

void main() {
    FOR_COUNTED(unit, gl_WorkGroupID.x, push.rows * push.chunks) {
        uint row = unit / push.chunks;
        uint first = unit % push.chunks * kChunk;
        uint count = min(kChunk, push.vocabulary - first);
        uint base = row * push.stride + first;
        Settings s = settings_of(row);
        float most = load_chunk(base, first, count);
        change_logits(row, first, count);
        uvec2 sum = sum_powers(base, count, most);
        uint key, id;
        choose(row, first, count, s, key, id);
        if (s.cut && first == 0u) {
            clear_bins(row);
        }
        top_candidates(base, count, push.top_n, unit * kMostTop);
        if (gl_LocalInvocationIndex == 0u) {
            uint at = unit * kRecord;
            push.operands.records.v[at + kRecordMost] = floatBitsToUint(most);
            push.operands.records.v[at + kRecordSum] = sum.x;
            push.operands.records.v[at + kRecordSum + 1u] = sum.y;
            push.operands.records.v[at + kRecordBestKey] = key;
            push.operands.records.v[at + kRecordBestId] = id;
            push.operands.records.v[at + kRecordBad] = shared_bad;
        }
    } NEXT_COUNTED(unit, push.rows * push.chunks, gl_NumWorkGroups.x);
}
