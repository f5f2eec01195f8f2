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

shared uint bin_low[2u * kBins], bin_high[2u * kBins];
shared uint group_low[kBins / kGroup], group_high[kBins / kGroup];
shared float gathered[kGathered]; // the logits of one bin
shared uint num_gathered;

uint cut_row;
uint cut_limit; // the greatest reversed key that is kept; these ascend from the likeliest
bool near_listed;

// Where a bin's tokens are looked for.
const uint kRow = 0u, kNearList = 1u, kGatheredBin = 2u;

uint num_fours(uint source) {
    uint listed = source == kNearList ? push.operands.bins.v[cut_row * kBinWords + kNumListed]
                                      : num_gathered;
    return source == kRow ? push.changed_stride4 : div_up(listed, 4u);
}

// Elements behind the end of a list are forbidden.
vec4 four_of(uint source, uint f) {
    if (source == kRow) {
        return push.operands.changed.v[cut_row * push.changed_stride4 + f];
    }
    vec4 x = vec4(-kInfinity);
    uint count = source == kNearList ? push.operands.bins.v[cut_row * kBinWords + kNumListed]
                                     : num_gathered;
    for (uint j = 0u; j < 4u; ++j) {
        if (4u * f + j < count) {
            x[j] = source == kNearList
                       ? uintBitsToFloat(push.operands.bins.v[cut_row * kBinWords + kList + 4u * f + j])
                       : gathered[4u * f + j];
        }
    }
    return x;
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
        for (uint b = 0u; b < kGroup; ++b) {
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
    near_listed = push.operands.bins.v[from + kNumListed] <= kListed;
}

// Gathers the tokens of a bin that are not listed; says where they are now.
uint source_of(uint bin) {
    if (near_listed && bin < kNearBins) {
        return kNearList;
    }
    barrier();
    if (gl_LocalInvocationIndex == 0u) {
        num_gathered = 0u;
    }
    barrier();
    FOR_COUNTED(f, gl_LocalInvocationIndex, push.changed_stride4) {
        vec4 x = four_of(kRow, f);
        for (uint j = 0u; j < 4u; ++j) {
            if (!is_forbidden(x[j]) && bin_of(x[j]) == bin && is_eligible(x[j])) {
                uint at = atomicAdd(num_gathered, 1u);
                if (at < kGathered) {
                    gathered[at] = x[j];
                }
            }
        }
    } NEXT_COUNTED(f, push.changed_stride4, local_size);
    barrier();
    return num_gathered <= kGathered ? kGatheredBin : kRow;
}

// The reversed key of a token of `bin` at which the mass (or the number) of the bin's tokens within
// cut_limit reaches `wanted`.
uint find_key(uint source, uint bin, uvec2 wanted, bool by_mass) {
    uint fours = num_fours(source);
    uint prefix = 0u;
    FOR_COUNTED(digit, 0u, 4u) {
        uint shift = 24u - 8u * digit;
        barrier();
        FOR_COUNTED(b, kCountBins + gl_LocalInvocationIndex, kCountBins + kDigits) {
            bin_low[b] = 0u;
            bin_high[b] = 0u;
        } NEXT_COUNTED(b, kCountBins + kDigits, local_size);
        barrier();
        FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
            vec4 x = four_of(source, f);
            for (uint j = 0u; j < 4u; ++j) {
                uint reversed = ~key_of(x[j]);
                bool same = digit == 0u || (reversed ^ prefix) >> (shift + 8u) == 0u;
                if (same && !is_forbidden(x[j]) && bin_of(x[j]) == bin && is_kept(x[j])) {
                    add_to_bin(kCountBins + (reversed >> shift & 255u),
                               by_mass ? fixed40(power_of(x[j])) : uvec2(1u, 0u));
                }
            }
        } NEXT_COUNTED(f, fours, local_size);
        prefix |= find_bin(kCountBins, kDigits, wanted) << shift;
    } NEXT_COUNTED(digit, 4u, 1u);
    return prefix;
}

// The mass of the tokens of `bin` within cut_limit.
uvec2 mass_within(uint source, uint bin) {
    uint fours = num_fours(source);
    uvec2 mass = uvec2(0u);
    FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
        vec4 x = four_of(source, f);
        for (uint j = 0u; j < 4u; ++j) {
            if (!is_forbidden(x[j]) && bin_of(x[j]) == bin && is_kept(x[j])) {
                mass = add64(mass, fixed40(power_of(x[j])));
            }
        }
    } NEXT_COUNTED(f, fours, local_size);
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
    uint source = near_listed && last < kNearBins ? kNearList : kRow;
    uint fours = num_fours(source);
    key = 0u;
    id = kNoToken;
    FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
        vec4 x = four_of(source, f);
        for (uint j = 0u; j < 4u; ++j) {
            if (is_kept(x[j])) {
                uint token = 4u * f + j;
                if (source == kNearList) {
                    token = push.operands.bins.v[cut_row * kBinWords + kList + kListed + token];
                }
                take_better(key, id, key_of(score(cut_settings, token, x[j])), token);
            }
        }
    } NEXT_COUNTED(f, fours, local_size);
    workgroup_best(key, id);
}

void draw_within_cuts(uint row, Settings s, float most, out uint key, out uint id) {
    cut_row = row;
    cut_most = most;
    cut_settings = s;
    cut_limit = 0xFFFFFFFFu;
    load_bins();
    uvec2 mass = sum_bins(0u, kBins);
    uint last = kBins - 1u;
    if (s.top_k > 0u && s.top_k < sum_bins(kCountBins, kBins).x) {
        uvec2 wanted = uvec2(s.top_k, 0u);
        last = find_bin(kCountBins, kBins, wanted);
        uint source = source_of(last);
        cut_limit = find_key(source, last, wanted, false);
        mass = add64(sum_bins(0u, last), mass_within(source, last));
    }
    if (s.top_p < 1.0) {
        uvec2 wanted = part_of(mass, s.top_p);
        last = find_bin(0u, kBins, wanted);
        cut_limit = find_key(source_of(last), last, wanted, true);
    }
    draw(last, key, id);
}

#endif
