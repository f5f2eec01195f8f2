// SPDX-License-Identifier: MIT
#include <bellows/train/expert_balance.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace bellows {

namespace {

/// Numbers of a step that are kept in each step, and the distance of steps where there are more.
constexpr std::uint64_t kMostLoads = 1024, kStepsBetweenLoads = 10;

double max_over_mean(const std::vector<double>& values) {
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    return sum > 0 ? *std::ranges::max_element(values) * static_cast<double>(values.size()) / sum
                   : 1;
}

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

std::vector<ExpertShare> expert_shares(std::uint64_t num_experts, std::uint64_t ep) {
    std::vector<ExpertShare> shares;
    for (std::uint64_t rank = 0; rank < ep; ++rank) {
        const std::uint64_t block = num_experts / ep + (rank < num_experts % ep ? 1 : 0);
        for (std::uint64_t i = 0; i < block; ++i)
            shares.push_back({.expert = shares.size(), .rank = rank});
    }
    return shares;
}

ExpertBalance expert_balance(const LayerLoads& layer, std::uint64_t ep, bool keep_loads) {
    const std::vector<double> loads(layer.loads.begin(), layer.loads.end());
    ExpertBalance balance{.layer = layer.layer,
                          .max_over_mean = max_over_mean(loads),
                          .entropy = normalised_entropy(loads)};
    if (ep > 1) {
        std::vector<double> rows(ep);
        for (const ExpertShare& of : expert_shares(loads.size(), ep))
            rows[of.rank] += loads[of.expert] * of.share;
        balance.ranks_max_over_mean = max_over_mean(rows);
    }
    if (keep_loads)
        balance.loads = layer.loads;
    return balance;
}

bool keeps_loads(std::uint64_t step, std::uint64_t numbers) noexcept {
    return numbers <= kMostLoads || step == 1 || step % kStepsBetweenLoads == 0;
}

} // namespace bellows
