// SPDX-License-Identifier: MIT
#include "app/run_groups.hpp"

#include <bellows/model/moe_ffn.hpp>
#include <bellows/model/stage.hpp>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

namespace bellows {

std::vector<std::uint32_t> phases_by_stage(const Schedule& schedule, std::uint64_t rank) {
    const auto& chunks = schedule.chunks[rank];
    std::vector<std::uint32_t> phases(chunks.size());
    std::iota(phases.begin(), phases.end(), 0u);
    std::ranges::sort(phases, {}, [&](std::uint32_t phase) { return chunks[phase].stage; });
    return phases;
}

std::vector<ParameterInfo> parameters_of_rank(const ModelConfig& model, const Schedule& schedule,
                                              std::uint64_t rank, std::uint64_t ep_index,
                                              std::uint64_t ep) {
    std::vector<ParameterInfo> all;
    for (const std::uint32_t phase : phases_by_stage(schedule, rank)) {
        auto some = parameters_of_stage(model, schedule.chunks[rank][phase].stage,
                                        schedule.num_stages, ep_index, ep);
        std::ranges::move(some, std::back_inserter(all));
    }
    return all;
}

std::vector<std::uint64_t> copies_of_rank(const Schedule& schedule, std::uint64_t rank) {
    const auto stages_of = [&](std::uint64_t of) {
        std::vector<std::uint64_t> stages;
        for (const ScheduleChunk& chunk : schedule.chunks[of])
            stages.push_back(chunk.stage);
        std::ranges::sort(stages);
        return stages;
    };
    std::vector<std::uint64_t> copies;
    for (std::uint64_t other = 0; other < schedule.num_ranks(); ++other)
        if (stages_of(other) == stages_of(rank))
            copies.push_back(other);
    return copies;
}

Group dp_group(const RunLayout& layout, const std::vector<std::uint64_t>& ranks) {
    std::vector<int> all;
    for (const std::uint64_t rank : ranks)
        for (std::uint64_t d = 0; d < layout.dp; ++d)
            all.push_back(static_cast<int>(rank * layout.dp + d));
    return Group(std::move(all));
}

Group ep_group(const RunLayout& layout, std::uint64_t rank, std::uint64_t d) {
    std::vector<int> ranks(layout.ep);
    std::iota(ranks.begin(), ranks.end(),
              static_cast<int>(rank * layout.dp + d / layout.ep * layout.ep));
    return Group(std::move(ranks));
}

Group replica_group(const RunLayout& layout, const std::vector<std::uint64_t>& ranks,
                    std::uint64_t d) {
    std::vector<int> all;
    for (const std::uint64_t rank : ranks)
        for (std::uint64_t at = d % layout.ep; at < layout.dp; at += layout.ep)
            all.push_back(static_cast<int>(rank * layout.dp + at));
    return Group(std::move(all));
}

ExchangeConfig exchange_config(const ModelConfig& model, Precision precision,
                               const RunLayout& layout, std::uint64_t rank, std::uint64_t d,
                               std::uint64_t tokens) {
    const Group group = ep_group(layout, rank, d);
    ExchangeConfig exchange =
        MoeFfn::exchange_config(model, activation_type(precision), linear_precision(precision));
    exchange.name = "experts";
    exchange.ranks = {group.ranks().begin(), group.ranks().end()};
    exchange.max_tokens = tokens;
    return exchange;
}

} // namespace bellows
