// SPDX-License-Identifier: MIT
#include "app/run_groups.hpp"

#include <numeric>
#include <utility>
#include <vector>

namespace bellows {

namespace {

Group consecutive(std::uint64_t first, std::uint64_t count) {
    std::vector<int> ranks(count);
    std::iota(ranks.begin(), ranks.end(), static_cast<int>(first));
    return Group(std::move(ranks));
}

} // namespace

Group dp_group(const RunLayout& layout, std::uint64_t stage) {
    return consecutive(stage * layout.dp, layout.dp);
}

Group ep_group(const RunLayout& layout, std::uint64_t stage, std::uint64_t d) {
    return consecutive(stage * layout.dp + d / layout.ep * layout.ep, layout.ep);
}

Group replica_group(const RunLayout& layout, std::uint64_t stage, std::uint64_t d) {
    std::vector<int> ranks;
    for (std::uint64_t at = d % layout.ep; at < layout.dp; at += layout.ep)
        ranks.push_back(static_cast<int>(stage * layout.dp + at));
    return Group(std::move(ranks));
}

ExchangeConfig exchange_config(const RunConfig& config, const RunLayout& layout,
                               std::uint64_t stage, std::uint64_t d, std::uint64_t tokens) {
    const Group group = ep_group(layout, stage, d);
    return {.name = "experts",
            .ranks = {group.ranks().begin(), group.ranks().end()},
            .num_experts = config.model.routed_experts,
            .top_k = config.model.top_k,
            .hidden = config.model.hidden,
            .max_tokens = tokens,
            .dtype = activation_type(config.train)};
}

} // namespace bellows
