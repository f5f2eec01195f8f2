// SPDX-License-Identifier: MIT
// How a router chooses a token's experts: scores s = sigmoid(logits) or softmax(logits); the top_k
// experts by s + bias (the bias takes part in the selection only), drawn from the group_top_k best of
// `groups` equal groups when groups > 1, where a group counts by the sum of its group_score_top best
// s + bias; weights w = s[expert] (/ sum of the chosen s) * route_scale. Equal values: the lower index
// first. At most 32 groups and a top_k of 64.
// The rules stand here for every kernel, and the form in which a workgroup chooses for one token: it
// counts for each expert how many stand before it, which takes one barrier, where choosing one after
// another takes several for each. Sums over experts: of every 64th, ascending, then these 64 by
// halves; the order does not depend on the size of the workgroup.
// Kernels declare local_size and shared_experts, at least the number of experts in that form (else 1).
// Shared memory of that form: 20 * round_up(shared_experts, 4) + 896 bytes.
#ifndef BELLOWS_ROUTER_CHOICE_GLSL
#define BELLOWS_ROUTER_CHOICE_GLSL

#include "math.glsl"
#include "storage.glsl"

#define kLowest uintBitsToFloat(0xFF800000u)
const uint kMaxGroups = 32u, kMaxTopK = 64u;

struct Router {
    uint experts, top_k, groups, group_top_k, group_score_top;
    bool softmax, normalise, has_bias;
    float route_scale;
    uvec2 bias; // [experts] f32
};

// ---- Rules

// What an expert of this score is selected by. Above every NaN stands every number.
float selection_of(Router router, uint expert, float score) {
    if (router.has_bias) {
        score += ReadFloat(router.bias).v[expert];
    }
    return is_nan(score) ? kLowest : score;
}

// A group's experts are taken in one after another: x has the best two.
vec2 best_two(vec2 x, float score) {
    return vec2(max(x.x, score), score > x.x ? x.x : max(x.y, score));
}

float score_of_group(Router router, vec2 best) {
    uint size = router.experts / router.groups;
    return router.group_score_top > 1u && size > 1u ? best.x + best.y : best.x;
}

// Whether a group goes before another one.
bool group_before(float score, uint group, float other_score, uint other) {
    return score > other_score || (score == other_score && group < other);
}

// What the scores of chosen experts, whose sum it is, become weights by.
float weight_factor(Router router, float sum) {
    return router.normalise ? router.route_scale / (sum + 1e-20) : router.route_scale;
}

// A number that is larger where the score is; equal scores have equal numbers. Never 0.
uint key_of(float score) {
    uint bits = score == 0.0 ? 0u : floatBitsToUint(score);
    return (bits & 0x80000000u) != 0u ? ~bits : bits | 0x80000000u;
}

// ---- A workgroup's token

const uint kRouterFours = (shared_experts + 3u) / 4u;
const uint kRouterColumns = 64u; // of experts, in sums
shared float shared_scores[4u * kRouterFours];
// Of experts that may be chosen key_of, of the others 0.
shared uvec4 shared_keys[kRouterFours];
shared vec4 shared_most[kRouterColumns / 4u];
shared vec4 shared_sums[kRouterColumns / 4u];
shared float shared_group_scores[kMaxGroups];
shared uint shared_chosen[kMaxTopK];

void score_by_sigmoid(Router router, uvec2 logits) {
    for (uint e = gl_LocalInvocationIndex; e < router.experts; e += local_size) {
        shared_scores[e] = sigmoid(ReadFloat(logits).v[e]);
    }
}

void score_by_softmax(Router router, uvec2 logits) {
    for (uint c = gl_LocalInvocationIndex; c < kRouterColumns; c += local_size) {
        float most = kLowest;
        for (uint e = c; e < router.experts; e += kRouterColumns) {
            float logit = ReadFloat(logits).v[e];
            shared_scores[e] = logit;
            most = max(most, logit);
        }
        shared_most[c / 4u][c % 4u] = most;
    }
    barrier();
    vec4 all_most = shared_most[0];
    [[unroll]] for (uint i = 1u; i < kRouterColumns / 4u; ++i) {
        all_most = max(all_most, shared_most[i]);
    }
    float most = max(max(all_most.x, all_most.y), max(all_most.z, all_most.w));
    for (uint c = gl_LocalInvocationIndex; c < kRouterColumns; c += local_size) {
        float sum = 0.0;
        for (uint e = c; e < router.experts; e += kRouterColumns) {
            float power = exp_f32(shared_scores[e] - most);
            shared_scores[e] = power;
            sum += power;
        }
        shared_sums[c / 4u][c % 4u] = sum;
    }
    barrier();
    vec4 sums[kRouterColumns / 8u];
    [[unroll]] for (uint i = 0u; i < kRouterColumns / 8u; ++i) {
        sums[i] = shared_sums[i] + shared_sums[i + kRouterColumns / 8u];
    }
    [[unroll]] for (uint width = kRouterColumns / 16u; width > 0u; width /= 2u) {
        [[unroll]] for (uint i = 0u; i < width; ++i) {
            sums[i] += sums[i + width];
        }
    }
    float sum = (sums[0].x + sums[0].z) + (sums[0].y + sums[0].w);
    for (uint c = gl_LocalInvocationIndex; c < kRouterColumns; c += local_size) {
        for (uint e = c; e < router.experts; e += kRouterColumns) {
            shared_scores[e] /= sum;
        }
    }
}

void score_groups(Router router) {
    uint size = router.experts / router.groups;
    for (uint g = gl_LocalInvocationIndex; g < router.groups; g += local_size) {
        vec2 best = vec2(kLowest);
        for (uint e = g * size; e < (g + 1u) * size; ++e) {
            best = best_two(best, selection_of(router, e, shared_scores[e]));
        }
        shared_group_scores[g] = score_of_group(router, best);
    }
    barrier();
}

bool group_is_selected(Router router, uint group) {
    uint rank = 0u;
    for (uint h = 0u; h < router.groups; ++h) {
        rank += group_before(shared_group_scores[h], h, shared_group_scores[group], group) ? 1u : 0u;
    }
    return rank < router.group_top_k;
}

// How many of four keys stand before `key` of expert e; the first of them is that of expert `first`.
uint count_before(uvec4 keys, uint first, uint key, uint e) {
    uvec4 at = uvec4(first, first + 1u, first + 2u, first + 3u);
    uvec4 before = uvec4(greaterThan(keys, uvec4(key))) |
                   (uvec4(equal(keys, uvec4(key))) & uvec4(lessThan(at, uvec4(e))));
    return before.x + before.y + before.z + before.w;
}

// Leaves the ids of the chosen experts in shared_chosen, in descending order, and all scores in
// shared_scores. All invocations call it; more than once only with a barrier between.
void choose_experts(Router router, uvec2 logits) {
    if (router.softmax) {
        score_by_softmax(router, logits);
    } else {
        score_by_sigmoid(router, logits);
    }
    uint size = router.experts;
    if (router.groups > 1u) {
        size /= router.groups;
        barrier();
        score_groups(router);
    } else {
        // Where an invocation finds what it has written itself, nothing has to be waited for.
        if (kRouterColumns % local_size != 0u) {
            barrier();
        }
    }
    for (uint e = gl_LocalInvocationIndex; e < 4u * kRouterFours; e += local_size) {
        uint key = 0u;
        if (e < router.experts && (router.groups <= 1u || group_is_selected(router, e / size))) {
            key = key_of(selection_of(router, e, shared_scores[e]));
        }
        shared_keys[e / 4u][e % 4u] = key;
    }
    barrier();
    for (uint e = gl_LocalInvocationIndex; e < router.experts; e += local_size) {
        uint key = shared_keys[e / 4u][e % 4u], rank = 0u;
        for (uint i = 0u; i < kRouterFours; ++i) {
            rank += count_before(shared_keys[i], 4u * i, key, e);
        }
        if (key != 0u && rank < router.top_k) {
            shared_chosen[rank] = e;
        }
    }
    barrier();
}

float chosen_factor(Router router) {
    float sum = 0.0;
    for (uint k = 0u; k < router.top_k; ++k) {
        sum += shared_scores[shared_chosen[k]];
    }
    return weight_factor(router, sum);
}

#endif
