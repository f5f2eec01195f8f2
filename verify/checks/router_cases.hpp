// SPDX-License-Identifier: MIT
#pragma once

// The cases of the router's checks: its ops against the reference, and both forms of its kernels.

#include "verify/checks/families.hpp"
#include "verify/reference/balance.hpp"

#include <bellows/engine/ops.hpp>

namespace bellows::checks {

struct RouterCase {
    const char* name;
    std::uint64_t tokens, experts, top_k;
    std::uint32_t groups, group_top_k;
    bool softmax, normalise, bias;
    double scale;
    Depth depth = Depth::Quick;
    GroupScore group_score = GroupScore::Auto;
};

inline constexpr auto kRouterCases = std::to_array<RouterCase>({
    {"one token", 1, 4, 1, 1, 1, false, true, false, 1},
    {"all chosen", 7, 5, 5, 1, 1, false, true, true, 1},
    {"odd", 33, 13, 3, 1, 1, false, false, true, 0.5},
    {"v2-lite", 130, 64, 6, 1, 1, true, false, false, 1},
    {"v2 with groups", 65, 40, 6, 8, 3, true, false, false, 16},
    {"v3", 100, 256, 8, 8, 4, false, true, true, 2.5},
    {"sigmoid, groups by their best", 40, 24, 4, 6, 2, false, true, true, 1, Depth::Quick,
     GroupScore::Max},
    {"softmax, groups by their best two", 40, 24, 4, 6, 2, true, false, false, 16, Depth::Quick,
     GroupScore::TopTwo},
    {"groups of one", 9, 12, 4, 12, 5, true, true, false, 1, Depth::Full},
    {"sigmoid, groups of one", 9, 12, 4, 12, 5, false, true, true, 1, Depth::Full},
    {"softmax, normalised", 50, 31, 4, 1, 1, true, true, true, 1, Depth::Full},
});

inline ops::RouterOptions options_of(const RouterCase& c) {
    return {.score =
                c.softmax ? ops::RouterOptions::Score::Softmax : ops::RouterOptions::Score::Sigmoid,
            .groups = c.groups,
            .group_top_k = c.group_top_k,
            .group_score_top = c.group_score == GroupScore::Auto  ? (c.softmax ? 1u : 2u)
                               : c.group_score == GroupScore::Max ? 1u
                                                                  : 2u,
            .normalise = c.normalise,
            .route_scale = static_cast<float>(c.scale)};
}

inline reference::RouterShape shape_of(const RouterCase& c) {
    return {.experts = c.experts,
            .top_k = c.top_k,
            .n_group = c.groups,
            .topk_group = c.group_top_k,
            .score = c.softmax ? ScoreFunction::Softmax : ScoreFunction::Sigmoid,
            .normalize = c.normalise,
            .scale = c.scale,
            .group_score = c.group_score};
}

/// Runs of equal length that the case's tokens make: more than one where they can.
inline std::uint64_t sequences_of(const RouterCase& c) {
    for (std::uint64_t divisor = 2; divisor < c.tokens; ++divisor)
        if (c.tokens % divisor == 0)
            return divisor;
    return 1;
}

/// Adds a check of each case that belongs to the depth.
inline void add_router_table(std::vector<OpCheck>& checks, Depth depth, const char* name,
                             void (*body)(Check&, const OpRig&, const RouterCase&)) {
    checks.push_back({"ops", name, [=](Check& check, const OpRig& rig) {
                          for (const RouterCase& c : kRouterCases)
                              if (c.depth <= depth)
                                  body(check, rig, c);
                      }});
}

} // namespace bellows::checks
