// SPDX-License-Identifier: MIT
#include <bellows/shape/expert_placement.hpp>
#include <bellows/train/expert_balance.hpp>

#include <cmath>
#include <numeric>

namespace bellows {

namespace {

/// Numbers of a step that are kept in each step, and the distance of steps where there are more.
constexpr std::uint64_t kMostLoads = 1024, kStepsBetweenLoads = 10;

/// Shannon's entropy of the shares by that of equal shares.
double normalised_entropy(const std::vector<double>& loads) {
    const double sum = std::accumulate(loads.begin(), loads.end(), 0.0);
    if (loads.size() < 2 || !(sum > 0))
        return 1;
    double entropy = 0;
    for (const double load : loads)
        if (load > 0)
            entropy -= load / sum * std::log(load / sum);
    return entropy / std::log(static_cast<double>(loads.size()));
}

} // namespace

ExpertBalance expert_balance(const LayerLoads& layer, bool keep_loads) {
    const std::vector<double> loads(layer.loads.begin(), layer.loads.end());
    ExpertBalance balance{.layer = layer.layer,
                          .max_over_mean = max_over_mean(loads),
                          .entropy = normalised_entropy(loads)};
    if (!layer.rank_loads.empty())
        balance.ranks_max_over_mean = max_over_mean(layer.rank_loads);
    const double all = std::accumulate(loads.begin(), loads.end(), 0.0);
    if (layer.kept)
        balance.dropped = all > 0 ? 1 - static_cast<double>(*layer.kept) / all : 0;
    if (keep_loads)
        balance.loads = layer.loads;
    return balance;
}

bool keeps_loads(std::uint64_t step, std::uint64_t numbers) noexcept {
    return numbers <= kMostLoads || step == 1 || step % kStepsBetweenLoads == 0;
}

} // namespace bellows
