// SPDX-License-Identifier: MIT
// The middle of ops::sample, for rows with thresholds: a workgroup takes kChunk columns of a row's
// changed logits, counts them into the row's bins (include/sampling_bins.glsl), which
// sample_chunks has cleared, and lists those that are near the greatest.
// Dispatch: grid-stride over rows * chunks workgroups. Shared memory: 6.1 KiB.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "include/common.glsl"
#include "include/math.glsl"
#include "sample_bins.kernel.glsl"
#include "include/sampling.glsl"
#include "include/sampling_bins.glsl"

shared uint mass_low[kBins], mass_high[kBins], counts[kBins];
shared uint list_at;

void clear_bins() {
    barrier();
    FOR_COUNTED(b, gl_LocalInvocationIndex, kBins) {
        mass_low[b] = 0u;
        mass_high[b] = 0u;
        counts[b] = 0u;
    } NEXT_COUNTED(b, kBins, local_size);
    barrier();
}

void add_bins(uint to) {
    barrier();
    FOR_COUNTED(b, gl_LocalInvocationIndex, kBins) {
        if (counts[b] != 0u) {
            uint low = mass_low[b];
            uint before = atomicAdd(push.operands.bins.v[to + kMassLow + b], low);
            uint high = mass_high[b] + (before + low < before ? 1u : 0u);
            if (high != 0u) {
                atomicAdd(push.operands.bins.v[to + kMassHigh + b], high);
            }
            atomicAdd(push.operands.bins.v[to + kCounts + b], counts[b]);
        }
    } NEXT_COUNTED(b, kBins, local_size);
}

// Returns how many of the invocation's tokens are near the greatest.
uint count_chunk(uint from, uint count) {
    uint num_near = 0u;
    FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
        float x = push.operands.changed.v[from + i];
        if (is_eligible(x)) {
            uint bin = bin_of(x);
            uvec2 weight = fixed40(power_of(x));
            uint before = atomicAdd(mass_low[bin], weight.x);
            uint high = weight.y + (before + weight.x < before ? 1u : 0u);
            if (high != 0u) {
                atomicAdd(mass_high[bin], high);
            }
            atomicAdd(counts[bin], 1u);
            num_near += bin < kNearBins ? 1u : 0u;
        }
    } NEXT_COUNTED(i, count, local_size);
    return num_near;
}

void list_near(uint from, uint first, uint count, uint to) {
    FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
        float x = push.operands.changed.v[from + i];
        if (is_eligible(x) && bin_of(x) < kNearBins) {
            uint at = to + kList + atomicAdd(list_at, 1u);
            push.operands.bins.v[at] = floatBitsToUint(x);
            push.operands.bins.v[at + kListed] = first + i;
        }
    } NEXT_COUNTED(i, count, local_size);
}

uint greatest_key(uint row) {
    uint key = 0u, id = kNoToken;
    FOR_COUNTED(c, gl_LocalInvocationIndex, push.chunks) {
        key = max(key,
                  push.operands.records.v[(row * push.chunks + c) * kRecord + kRecordBestKey]);
    } NEXT_COUNTED(c, push.chunks, local_size);
    workgroup_best(key, id);
    return key;
}

void main() {
    FOR_COUNTED(unit, gl_WorkGroupID.x, push.rows * push.chunks) {
        uint row = unit / push.chunks;
        cut_settings = settings_of(row);
        if (cut_settings.cut) {
            uint first = unit % push.chunks * kChunk;
            uint count = min(kChunk, push.vocabulary - first);
            uint from = row * push.changed_stride + first;
            uint to = row * kBinWords;
            cut_most = value_of(greatest_key(row));
            clear_bins();
            uint num_near = workgroup_sum(uvec2(count_chunk(from, count), 0u)).x;
            add_bins(to);
            if (gl_LocalInvocationIndex == 0u) {
                list_at = num_near == 0u
                              ? 0u
                              : atomicAdd(push.operands.bins.v[to + kNumListed], num_near);
            }
            barrier();
            uint listed = list_at;
            barrier();
            if (listed + num_near <= kListed) {
                list_near(from, first, count, to);
            }
            barrier();
        }
    } NEXT_COUNTED(unit, push.rows * push.chunks, gl_NumWorkGroups.x);
}
