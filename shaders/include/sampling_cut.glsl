// SPDX-License-Identifier: MIT
// min-p, top-k and top-p of a row and the draw from what is left. The row's bins say in which bin a
// threshold lies; where it lies there is found digit by digit of the logits' keys.
//   Operands: `changed` [rows, changed_stride4] vec4, `bins` (include/sampling_bins.glsl).
#ifndef BELLOWS_SAMPLING_CUT_GLSL
#define BELLOWS_SAMPLING_CUT_GLSL

#include "sampling_bins.glsl"

const uint kDigits = 256u;
const uint kCountBins = kBins; // where counts of tokens, then digits stand in shared memory
const uint kGroup = 16u;
const uint kGathered = 768u;
const uint kFew = 96u;

shared uint bin_low[2u * kBins], bin_high[2u * kBins];
shared uint group_low[kBins / kGroup], group_high[kBins / kGroup];
shared float gathered[kGathered]; // the logits of one bin
shared uint num_gathered;

uint cut_row;
uint cut_limit; // the greatest reversed key that is kept; these ascend from the likeliest
bool near_listed;

uint num_listed() {
    return push.operands.bins.v[cut_row * kBinWords + kNumListed];
}
uint listed_at(uint i) {
    return push.operands.bins.v[cut_row * kBinWords + kList + i];
}
vec4 row_four(uint f) {
    return push.operands.changed.v[cut_row * push.changed_stride4 + f];
}

bool is_kept(float x) {
    return ~key_of(x) <= cut_limit && is_eligible(x);
}

uvec2 bin_at(uint b) {
    return uvec2(bin_low[b], bin_high[b]);
}

void add_to_bin(uint bin, uvec2 n) {
    uint before = atomicAdd(bin_low[bin], n.x);
    uint high = n.y + (before + n.x < before ? 1u : 0u);
    if (high != 0u) {
        atomicAdd(bin_high[bin], high);
    }
}

uvec2 sum_bins(uint first, uint count) {
    uvec2 sum = uvec2(0u);
    FOR_COUNTED(b, first + gl_LocalInvocationIndex, first + count) {
        sum = add64(sum, bin_at(b));
    } NEXT_COUNTED(b, first + count, local_size);
    return workgroup_sum(sum);
}

// The bin in which the sum over `count` bins from `first` on reaches `wanted` (otherwise the last),
// and in `wanted` what is missing before it.
uint find_bin(uint first, uint count, inout uvec2 wanted) {
    barrier();
    FOR_COUNTED(g, gl_LocalInvocationIndex, count / kGroup) {
        uvec2 sum = uvec2(0u);
        [[dont_unroll]] for (uint b = 0u; b < kGroup; ++b) {
            sum = add64(sum, bin_at(first + g * kGroup + b));
        }
        group_low[g] = sum.x;
        group_high[g] = sum.y;
    } NEXT_COUNTED(g, count / kGroup, local_size);
    barrier();
    uint group = 0u;
    while (group + 1u < count / kGroup &&
           less64(uvec2(group_low[group], group_high[group]), wanted)) {
        wanted = subtract64(wanted, uvec2(group_low[group], group_high[group]));
        ++group;
    }
    uint bin = group * kGroup;
    uint end = bin + kGroup - 1u;
    while (bin < end && less64(bin_at(first + bin), wanted)) {
        wanted = subtract64(wanted, bin_at(first + bin));
        ++bin;
    }
    return bin;
}

void load_bins() {
    uint from = cut_row * kBinWords;
    barrier();
    FOR_COUNTED(b, gl_LocalInvocationIndex, kBins) {
        bin_low[b] = push.operands.bins.v[from + kMassLow + b];
        bin_high[b] = push.operands.bins.v[from + kMassHigh + b];
        bin_low[kCountBins + b] = push.operands.bins.v[from + kCounts + b];
        bin_high[kCountBins + b] = 0u;
    } NEXT_COUNTED(b, kBins, local_size);
    barrier();
    near_listed = num_listed() <= kListed;
}

void gather_one(uint bin, float x) {
    if (!is_forbidden(x) && bin_of(x) == bin && is_eligible(x)) {
        uint at = atomicAdd(num_gathered, 1u);
        if (at < kGathered) {
            gathered[at] = x;
        }
    }
}

// Gathers the tokens of a bin; where they are more than kGathered, they are looked for in the row.
void gather(uint bin) {
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        num_gathered = 0u;
    }
    barrier();
    if (near_listed && bin < kNearBins) {
        FOR_COUNTED(i, gl_LocalInvocationIndex, num_listed()) {
            gather_one(bin, uintBitsToFloat(listed_at(i)));
        } NEXT_COUNTED(i, num_listed(), local_size);
    } else {
        FOR_COUNTED(f, gl_LocalInvocationIndex, push.changed_stride4) {
            vec4 x = row_four(f);
            [[dont_unroll]] for (uint j = 0u; j < 4u; ++j) {
                gather_one(bin, x[j]);
            }
        } NEXT_COUNTED(f, push.changed_stride4, local_size);
    }
    barrier();
}

uint num_searched() {
    return num_gathered <= kGathered ? num_gathered : 4u * push.changed_stride4;
}
float searched_at(uint i) {
    return num_gathered <= kGathered ? gathered[i] : row_four(i / 4u)[i % 4u];
}
bool is_searched(uint bin, float x) {
    return !is_forbidden(x) && bin_of(x) == bin && is_kept(x);
}

// find_key() where a bin has at most kFew tokens: each sums up those that are not behind it.
uint find_key_of_few(uvec2 wanted, bool by_mass) {
    barrier();
    FOR_COUNTED(i, gl_LocalInvocationIndex, num_gathered) {
        uvec2 weight = by_mass ? fixed40(power_of(gathered[i])) : uvec2(1u, 0u);
        bool kept = is_kept(gathered[i]);
        bin_low[kCountBins + i] = kept ? weight.x : 0u;
        bin_high[kCountBins + i] = kept ? weight.y : 0u;
    } NEXT_COUNTED(i, num_gathered, local_size);
    if (gl_LocalInvocationIndex == 0u) {
        group_low[0] = 0xFFFFFFFFu;
    }
    barrier();
    FOR_COUNTED(i, gl_LocalInvocationIndex, num_gathered) {
        uint own = ~key_of(gathered[i]);
        uvec2 sum = uvec2(0u);
        FOR_COUNTED(j, 0u, num_gathered) {
            bool counts = ~key_of(gathered[j]) <= own;
            sum = add64(sum, counts ? bin_at(kCountBins + j) : uvec2(0u));
        } NEXT_COUNTED(j, num_gathered, 1u);
        if (!less64(sum, wanted)) {
            atomicMin(group_low[0], own);
        }
    } NEXT_COUNTED(i, num_gathered, local_size);
    barrier();
    return group_low[0];
}

// The reversed key of a token of `bin`, which has been gathered, at which the mass (or the number)
// of the bin's tokens within cut_limit reaches `wanted`.
uint find_key(uint bin, uvec2 wanted, bool by_mass) {
    if (num_gathered <= kFew) {
        return find_key_of_few(wanted, by_mass);
    }
    uint prefix = 0u;
    FOR_COUNTED(digit, 0u, 4u) {
        uint shift = 24u - 8u * digit;
        barrier();
        FOR_COUNTED(b, kCountBins + gl_LocalInvocationIndex, kCountBins + kDigits) {
            bin_low[b] = 0u;
            bin_high[b] = 0u;
        } NEXT_COUNTED(b, kCountBins + kDigits, local_size);
        barrier();
        FOR_COUNTED(i, gl_LocalInvocationIndex, num_searched()) {
            float x = searched_at(i);
            uint reversed = ~key_of(x);
            bool same = digit == 0u || (reversed ^ prefix) >> (shift + 8u) == 0u;
            if (same && is_searched(bin, x)) {
                add_to_bin(kCountBins + (reversed >> shift & 255u),
                           by_mass ? fixed40(power_of(x)) : uvec2(1u, 0u));
            }
        } NEXT_COUNTED(i, num_searched(), local_size);
        prefix |= find_bin(kCountBins, kDigits, wanted) << shift;
    } NEXT_COUNTED(digit, 4u, 1u);
    return prefix;
}

// The mass of the tokens of `bin`, which has been gathered, within cut_limit.
uvec2 mass_within(uint bin) {
    uvec2 mass = uvec2(0u);
    FOR_COUNTED(i, gl_LocalInvocationIndex, num_searched()) {
        float x = searched_at(i);
        if (is_searched(bin, x)) {
            mass = add64(mass, fixed40(power_of(x)));
        }
    } NEXT_COUNTED(i, num_searched(), local_size);
    return workgroup_sum(mass);
}

// mass * part, part in [0, 1) to 32 bits, and at least 1.
uvec2 part_of(uvec2 mass, float part) {
    uint factor = uint(max(part, 0.0) * 4294967296.0);
    uint high, low, high_of_low, low_of_low;
    umulExtended(mass.y, factor, high, low);
    umulExtended(mass.x, factor, high_of_low, low_of_low);
    uvec2 product = add64(uvec2(low, high), uvec2(high_of_low, 0u));
    return (product.x | product.y) == 0u ? uvec2(1u, 0u) : product;
}

// The token with the best score among those within cut_limit, which are in bins up to `last`.
void draw(uint last, out uint key, out uint id) {
    bool from_list = near_listed && last < kNearBins;
    uint count = from_list ? num_listed() : 4u * push.changed_stride4;
    key = 0u;
    id = kNoToken;
    FOR_COUNTED(i, gl_LocalInvocationIndex, count) {
        uint token = i;
        float x;
        if (from_list) {
            token = listed_at(kListed + i);
            x = uintBitsToFloat(listed_at(i));
        } else {
            x = row_four(i / 4u)[i % 4u];
        }
        if (is_kept(x)) {
            take_better(key, id, key_of(score(cut_settings, token, x)), token);
        }
    } NEXT_COUNTED(i, count, local_size);
    workgroup_best(key, id);
}

void draw_within_cuts(uint row, Settings s, float most, out uint key, out uint id) {
    cut_row = row;
    cut_most = most;
    cut_settings = s;
    cut_limit = 0xFFFFFFFFu;
    load_bins();
    uint last = kBins - 1u, gathered_bin = kBins;
    // First top-k, by numbers, then top-p, by mass; once in the code, which compiles the faster.
    FOR_COUNTED(by_mass, 0u, 2u) {
        uint first = by_mass != 0u ? 0u : kCountBins;
        uvec2 sum = sum_bins(first, last);
        sum = add64(sum, last == gathered_bin ? mass_within(last) : bin_at(first + last));
        bool asked = by_mass != 0u ? s.top_p < 1.0 : s.top_k > 0u && s.top_k < sum.x;
        if (asked) {
            uvec2 wanted = by_mass != 0u ? part_of(sum, s.top_p) : uvec2(s.top_k, 0u);
            last = find_bin(first, kBins, wanted);
            if (last != gathered_bin) {
                gather(last);
                gathered_bin = last;
            }
            cut_limit = find_key(last, wanted, by_mass != 0u);
        }
    } NEXT_COUNTED(by_mass, 2u, 1u);
    draw(last, key, id);
}

#endif
