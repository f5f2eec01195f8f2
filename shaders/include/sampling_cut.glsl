// SPDX-License-Identifier: MIT
// min-p, top-k and top-p of a row and the draw from what is left. The changed logits stand in
// operand `changed` [rows, changed_stride4] vec4. Probability mass is counted in fixed point.
#ifndef BELLOWS_SAMPLING_CUT_GLSL
#define BELLOWS_SAMPLING_CUT_GLSL

const uint kBins = 512u;       // of kBinsPerUnit to one unit of tempered logit, the last for the rest
const float kBinsPerUnit = 16.0;
const uint kNearBins = 128u;   // whose tokens are listed, where they are kListed at most
const uint kListed = 768u;
const uint kDigits = 256u;
const uint kCounts = kBins;    // where counts of tokens (and afterwards of digits) stand among bins
const uint kGroup = 16u;

shared uint bin_low[2u * kBins], bin_high[2u * kBins]; // mass, then counts
shared uint group_low[kBins / kGroup], group_high[kBins / kGroup];
shared float listed[kListed];
shared uint listed_ids[kListed];
shared uint num_listed;

uint cut_at;        // of the row's first vec4
float cut_most;     // greatest changed logit
Settings cut_settings;
bool cut_listed;    // elements of bins below kNearBins are those of the list
uint cut_limit;     // greatest reversed key that is kept

// A token as the cuts see it; reversed keys ascend from the likeliest.
struct Element {
    bool eligible; // neither forbidden nor below min-p
    uint bin, reversed;
    float power;   // of the greatest probability
};

Element element_of(float x) {
    precise float below = (x - cut_most) * cut_settings.inverse;
    Element e;
    e.power = exp_f32(below);
    e.eligible = !is_forbidden(x) && !(e.power < cut_settings.min_p);
    e.bin = uint(min(-below * kBinsPerUnit, float(kBins - 1u)));
    e.reversed = ~key_of(x);
    return e;
}

// Elements that bins up to `last` can be among, by fours.
bool reads_list(uint last) {
    return cut_listed && last < kNearBins;
}
uint num_fours(bool from_list) {
    return from_list ? div_up(num_listed, 4u) : push.changed_stride4;
}
vec4 four_of(bool from_list, uint f) {
    if (from_list) {
        return vec4(listed[4u * f], listed[4u * f + 1u], listed[4u * f + 2u], listed[4u * f + 3u]);
    }
    return push.operands.changed.v[cut_at + f];
}

void add_to_bin(uint bin, uvec2 n) {
    uint before = atomicAdd(bin_low[bin], n.x);
    uint high = n.y + (before + n.x < before ? 1u : 0u);
    if (high != 0u) {
        atomicAdd(bin_high[bin], high);
    }
}

void clear_bins(uint first, uint count) {
    barrier();
    FOR_COUNTED(b, first + gl_LocalInvocationIndex, first + count) {
        bin_low[b] = 0u;
        bin_high[b] = 0u;
    } NEXT_COUNTED(b, first + count, local_size);
    barrier();
}

uvec2 bin_at(uint b) {
    return uvec2(bin_low[b], bin_high[b]);
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

// Fills the bins and the list; returns the mass and the number of all eligible tokens.
uvec2 fill_bins(out uint tokens) {
    clear_bins(0u, 2u * kBins);
    if (gl_LocalInvocationIndex == 0u) {
        num_listed = 0u;
    }
    FOR_COUNTED(i, gl_LocalInvocationIndex, kListed) {
        listed[i] = -kInfinity;
    } NEXT_COUNTED(i, kListed, local_size);
    barrier();
    uvec2 mass = uvec2(0u);
    uint count = 0u;
    FOR_COUNTED(f, gl_LocalInvocationIndex, push.changed_stride4) {
        vec4 x = push.operands.changed.v[cut_at + f];
        for (uint j = 0u; j < 4u; ++j) {
            Element e = element_of(x[j]);
            if (e.eligible) {
                uvec2 weight = fixed40(e.power);
                mass = add64(mass, weight);
                ++count;
                add_to_bin(e.bin, weight);
                atomicAdd(bin_low[kCounts + e.bin], 1u);
                if (e.bin < kNearBins) {
                    uint at = atomicAdd(num_listed, 1u);
                    if (at < kListed) {
                        listed[at] = x[j];
                        listed_ids[at] = 4u * f + j;
                    }
                }
            }
        }
    } NEXT_COUNTED(f, push.changed_stride4, local_size);
    mass = workgroup_sum(mass);
    tokens = workgroup_sum(uvec2(count, 0u)).x;
    cut_listed = num_listed <= kListed;
    return mass;
}

// The reversed key of an element of `bin` at which the mass (or the number) of the bin's elements
// within cut_limit reaches `wanted`.
uint find_key(uint bin, uvec2 wanted, bool by_mass) {
    bool from_list = reads_list(bin);
    uint fours = num_fours(from_list);
    uint prefix = 0u;
    FOR_COUNTED(digit, 0u, 4u) {
        uint shift = 24u - 8u * digit;
        clear_bins(kCounts, kDigits);
        FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
            vec4 x = four_of(from_list, f);
            for (uint j = 0u; j < 4u; ++j) {
                Element e = element_of(x[j]);
                bool same = digit == 0u || (e.reversed ^ prefix) >> (shift + 8u) == 0u;
                if (e.eligible && e.bin == bin && e.reversed <= cut_limit && same) {
                    add_to_bin(kCounts + (e.reversed >> shift & 255u),
                               by_mass ? fixed40(e.power) : uvec2(1u, 0u));
                }
            }
        } NEXT_COUNTED(f, fours, local_size);
        prefix |= find_bin(kCounts, kDigits, wanted) << shift;
    } NEXT_COUNTED(digit, 4u, 1u);
    return prefix;
}

// The mass of the elements of `bin` within cut_limit.
uvec2 mass_within(uint bin) {
    bool from_list = reads_list(bin);
    uint fours = num_fours(from_list);
    uvec2 mass = uvec2(0u);
    FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
        vec4 x = four_of(from_list, f);
        for (uint j = 0u; j < 4u; ++j) {
            Element e = element_of(x[j]);
            if (e.eligible && e.bin == bin && e.reversed <= cut_limit) {
                mass = add64(mass, fixed40(e.power));
            }
        }
    } NEXT_COUNTED(f, fours, local_size);
    return workgroup_sum(mass);
}

uvec2 mass_before(uint bin) {
    uvec2 mass = uvec2(0u);
    FOR_COUNTED(b, gl_LocalInvocationIndex, bin) {
        mass = add64(mass, bin_at(b));
    } NEXT_COUNTED(b, bin, local_size);
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

// The token with the best score among those in bins up to `last` and within cut_limit.
void draw(uint last, out uint key, out uint id) {
    bool from_list = reads_list(last);
    uint fours = num_fours(from_list);
    key = 0u;
    id = kNoToken;
    FOR_COUNTED(f, gl_LocalInvocationIndex, fours) {
        vec4 x = four_of(from_list, f);
        for (uint j = 0u; j < 4u; ++j) {
            Element e = element_of(x[j]);
            if (e.eligible && e.reversed <= cut_limit) {
                uint token = 4u * f + j;
                if (from_list) {
                    token = listed_ids[token];
                }
                take_better(key, id, key_of(score(cut_settings, token, x[j])), token);
            }
        }
    } NEXT_COUNTED(f, fours, local_size);
    workgroup_best(key, id);
}

void draw_within_cuts(uint row, Settings s, float most, out uint key, out uint id) {
    cut_at = row * push.changed_stride4;
    cut_most = most;
    cut_settings = s;
    cut_limit = 0xFFFFFFFFu;
    uint tokens;
    uvec2 mass = fill_bins(tokens);
    uint last = kBins - 1u;
    if (s.top_k > 0u && s.top_k < tokens) {
        uvec2 wanted = uvec2(s.top_k, 0u);
        last = find_bin(kCounts, kBins, wanted);
        cut_limit = find_key(last, wanted, false);
        mass = add64(mass_before(last), mass_within(last));
    }
    if (s.top_p < 1.0) {
        uvec2 wanted = part_of(mass, s.top_p);
        last = find_bin(0u, kBins, wanted);
        cut_limit = find_key(last, wanted, true);
    }
    draw(last, key, id);
}

#endif
