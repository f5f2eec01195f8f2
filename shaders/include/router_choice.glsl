// SPDX-License-Identifier: MIT
// How a router chooses a token's experts: scores s = sigmoid(logits) or softmax(logits); the top_k
// experts by s + bias (the bias takes part in the selection only), drawn from the group_top_k best of
// `groups` equal groups when groups > 1, where a group counts by the sum of its group_score_top best
// s + bias; weights w = s[expert] (/ sum of the chosen s) * route_scale. Equal values: the lower index
// first. At most 32 groups and a top_k of 64.
// The rules stand here for every kernel, and two forms in which a workgroup chooses for one token:
//   ROUTER_BY_SUBGROUP 1: every full subgroup does it all, one choice after another, in registers: few
//                         instructions, as each is fetched for one use alone;
//   ROUTER_BY_SUBGROUP 0: the workgroup counts for each expert how many stand before it.
// Sums over experts: of every 64th, ascending, then these 64 by halves; the order, and so bits, are
// those of both forms and of any size of workgroups and subgroups.
// A choice is told to who wants the wanted-th of them; in the first form invocations of a subgroup may
// want several, and top_k is at most its size.
// Kernels declare local_size, shared_experts, at least the number of experts in these forms (else 1),
// in the first form `subgroup`, its size of 8 to 64, and keep_score(expert, score), which is called for
// every expert.
// Shared memory: 20 * round_up(shared_experts, 4) + 896 bytes at most.
#ifndef BELLOWS_ROUTER_CHOICE_GLSL
#define BELLOWS_ROUTER_CHOICE_GLSL

#include "math.glsl"
#include "storage.glsl"
#if ROUTER_BY_SUBGROUP
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

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
shared float shared_group_scores[kMaxGroups];

struct Choice {
    uint expert;
    float score, sum; // of the expert, and of all that are chosen
};

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

#if ROUTER_BY_SUBGROUP

const uint kOwn = (shared_experts + subgroup - 1u) / subgroup; // experts of an invocation: every so-many-th
const uint kOwnColumns = kRouterColumns / subgroup;

void score_by_sigmoid(Router router, inout float scores[kOwn]) {
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        scores[j] = sigmoid(scores[j]);
    }
}

void score_by_softmax(Router router, uint lane, inout float scores[kOwn]) {
    float most = scores[0];
    [[unroll]] for (uint j = 1u; j < kOwn; ++j) {
        most = max(most, scores[j]);
    }
    [[dont_unroll]] for (uint reach = subgroup / 2u; reach > 0u; reach /= 2u) {
        most = max(most, subgroupShuffleXor(most, reach));
    }
    float sums[kOwnColumns];
    [[unroll]] for (uint i = 0u; i < kOwnColumns; ++i) {
        sums[i] = 0.0;
    }
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        scores[j] = lane + j * subgroup < router.experts ? exp_f32(scores[j] - most) : 0.0;
        sums[j % kOwnColumns] += scores[j];
    }
    [[unroll]] for (uint width = kOwnColumns / 2u; width > 0u; width /= 2u) {
        [[unroll]] for (uint i = 0u; i < width; ++i) {
            sums[i] += sums[i + width];
        }
    }
    [[dont_unroll]] for (uint reach = subgroup / 2u; reach > 0u; reach /= 2u) {
        sums[0] += subgroupShuffleXor(sums[0], reach);
    }
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        scores[j] /= sums[0];
    }
}

// Bit g: group g may be drawn from. All invocations of the workgroup call it.
uint select_groups(Router router, uint lane, float scores[kOwn]) {
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        if (lane + j * subgroup < router.experts) { // every subgroup writes the same
            shared_scores[lane + j * subgroup] = scores[j];
        }
    }
    barrier();
    score_groups(router);
    uint selected = 0u;
    [[dont_unroll]] for (uint first = 0u; first < router.groups; first += subgroup) {
        uint group = min(first + lane, router.groups - 1u);
        selected |= subgroupBallot(group_is_selected(router, group) && first + lane < router.groups).x
                    << first;
    }
    return selected;
}

// All invocations call it; more than once only with a barrier between.
Choice choose_experts(Router router, uvec2 logits, uint wanted) {
    uint lane = gl_LocalInvocationIndex % subgroup;
    float scores[kOwn];
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        uint e = lane + j * subgroup;
        scores[j] = kLowest;
        if (e < router.experts) {
            scores[j] = ReadFloat(logits).v[e];
        }
    }
    if (router.softmax) {
        score_by_softmax(router, lane, scores);
    } else {
        score_by_sigmoid(router, scores);
    }
    uint selected = router.groups > 1u ? select_groups(router, lane, scores) : 1u;
    uint size = router.experts / max(router.groups, 1u);
    uint keys[kOwn]; // 0: of what may not be chosen
    [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
        uint e = lane + j * subgroup;
        keys[j] = 0u;
        if (e < router.experts) {
            keep_score(e, scores[j]);
            if ((selected >> e / size & 1u) != 0u) {
                keys[j] = key_of(selection_of(router, e, scores[j]));
            }
        }
    }
    Choice choice = Choice(0u, 0.0, 0.0);
    [[dont_unroll]] for (uint k = 0u; k < router.top_k; ++k) {
        uint best = 0u, expert = 0xFFFFFFFFu;
        float score = 0.0;
        [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
            if (keys[j] > best) { // of equal ones the first stays
                best = keys[j];
                expert = lane + j * subgroup;
                score = scores[j];
            }
        }
        uint most = best, first = expert;
        [[dont_unroll]] for (uint reach = subgroup / 2u; reach > 0u; reach /= 2u) {
            uint other = subgroupShuffleXor(most, reach), other_first = subgroupShuffleXor(first, reach);
            bool better = other > most || (other == most && other_first < first);
            most = better ? other : most;
            first = better ? other_first : first;
        }
        score = subgroupShuffle(score, first % subgroup);
        [[unroll]] for (uint j = 0u; j < kOwn; ++j) {
            keys[j] = first == lane + j * subgroup ? 0u : keys[j];
        }
        choice.sum += score;
        if (k == wanted) {
            choice.expert = first;
            choice.score = score;
        }
    }
    return choice;
}

#else

// Of experts that may be chosen key_of, of the others 0.
shared uvec4 shared_keys[kRouterFours];
shared vec4 shared_most[kRouterColumns / 4u];
shared vec4 shared_sums[kRouterColumns / 4u];
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

// How many of four keys stand before `key` of expert e; the first of them is that of expert `first`.
uint count_before(uvec4 keys, uint first, uint key, uint e) {
    uvec4 at = uvec4(first, first + 1u, first + 2u, first + 3u);
    uvec4 before = uvec4(greaterThan(keys, uvec4(key))) |
                   (uvec4(equal(keys, uvec4(key))) & uvec4(lessThan(at, uvec4(e))));
    return before.x + before.y + before.z + before.w;
}

// All invocations call it; more than once only with a barrier between.
Choice choose_experts(Router router, uvec2 logits, uint wanted) {
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
        if (e < router.experts) {
            keep_score(e, shared_scores[e]);
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
    float sum = 0.0;
    for (uint k = 0u; k < router.top_k; ++k) {
        sum += shared_scores[shared_chosen[k]];
    }
    uint expert = shared_chosen[min(wanted, router.top_k - 1u)];
    return Choice(expert, shared_scores[expert], sum);
}

#endif

#endif
