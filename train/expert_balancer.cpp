// SPDX-License-Identifier: MIT
#include "expert_balancer.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

namespace bellows {

ExpertBalancer::ExpertBalancer(const Desc& desc) : desc_(desc) {
    for (std::uint64_t layer = desc_.dense_layers; layer < desc_.layers; ++layer) {
        placements_[layer] = plain_placement(desc_.experts, desc_.ranks, desc_.slots_of_rank);
        seen_[layer].assign(desc_.experts, 0);
    }
}

std::vector<double> ExpertBalancer::rank_loads(const LayerLoads& layer) const {
    const std::vector<double> loads(layer.loads.begin(), layer.loads.end());
    return bellows::rank_loads(placement(layer.layer), loads);
}

ExpertPlacement ExpertBalancer::balanced(std::span<const double> loads) const {
    return rebalance_experts(loads, {.groups = desc_.groups,
                                     .nodes = desc_.nodes,
                                     .ranks = desc_.ranks,
                                     .replicas = desc_.replicas,
                                     .distinct = true})
        .placement;
}

std::map<std::uint64_t, ExpertPlacement>
ExpertBalancer::after_step(std::uint64_t done, std::span<const LayerLoads> loads) {
    moved_.clear();
    std::map<std::uint64_t, ExpertPlacement> changed;
    if (desc_.every == 0 || desc_.slots_of_rank == 0)
        return changed;
    for (const LayerLoads& layer : loads)
        for (std::size_t expert = 0; expert < layer.loads.size(); ++expert)
            seen_.at(layer.layer).at(expert) += static_cast<double>(layer.loads[expert]);
    if (done % desc_.every != 0)
        return changed;
    for (auto& [layer, seen] : seen_) {
        ExpertPlacement& now = placements_.at(layer);
        ExpertPlacement next = keep_slots(now, balanced(seen));
        placed_by_[layer] = seen;
        for (const ExpertMove& move : expert_moves(now, next))
            if (move.rank != move.from_rank)
                moved_.push_back({.layer = layer,
                                  .expert = static_cast<std::uint64_t>(move.expert),
                                  .from = move.from_rank,
                                  .to = move.rank});
        if (next != now) {
            now = next;
            changed.emplace(layer, std::move(next));
        }
        seen.assign(desc_.experts, 0);
    }
    return changed;
}

ExpertPlaces ExpertBalancer::places() const {
    if (desc_.slots_of_rank == 0)
        return {};
    return {placements_, seen_, placed_by_};
}

void ExpertBalancer::resume(const ExpertPlaces& places) {
    for (const auto& [layer, placement] : places.placements) {
        const auto loads = places.loads.find(layer);
        const auto by = places.placed_by.find(layer);
        if (placements_.count(layer) == 0 || placement.num_experts != desc_.experts ||
            loads == places.loads.end() || loads->second.size() != desc_.experts ||
            (by != places.placed_by.end() && by->second.size() != desc_.experts))
            throw Error(ErrorCode::InvalidArgument,
                        "the checkpoint places " + std::to_string(placement.num_experts) +
                            " experts of layer " + std::to_string(layer) + "; the model has " +
                            std::to_string(desc_.experts) + " in layers " +
                            std::to_string(desc_.dense_layers) + " to " +
                            std::to_string(desc_.layers) + " (exclusive)");
        if (desc_.slots_of_rank == 0)
            continue;
        seen_.at(layer) = loads->second;
        ExpertPlacement& now = placements_.at(layer);
        if (by != places.placed_by.end())
            placed_by_[layer] = by->second;
        if (placement.num_ranks == now.num_ranks && placement.slots_of_rank == now.slots_of_rank) {
            now = placement;
            continue;
        }
        // Just after a placement there are no loads since then.
        std::vector<double> known = loads->second;
        if (by != places.placed_by.end())
            std::ranges::transform(known, by->second, known.begin(), std::plus{});
        if (std::ranges::any_of(known, [](double load) { return load > 0; }))
            now = keep_slots(now, balanced(known));
    }
}

} // namespace bellows
