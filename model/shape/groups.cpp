// SPDX-License-Identifier: MIT
#include <bellows/shape/groups.hpp>

#include <numeric>
#include <utility>

namespace bellows {

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

ExchangeConfig expert_exchange_config(const ModelConfig& config, DType activations,
                                      LinearPrecision precision) {
    ExchangeConfig exchange;
    exchange.num_experts = config.routed_experts;
    exchange.top_k = config.top_k;
    exchange.hidden = config.hidden;
    exchange.dtype = activations;
    if (precision == LinearPrecision::Fp8) {
        exchange.token_wire = exchange.gradient_wire = DType::F8E4M3;
        exchange.layout = ExchangeLayout::ExpertSlots;
    }
    return exchange;
}

ExchangeConfig exchange_config(const ModelConfig& model, const TrainingShape& shape,
                               const RunLayout& layout, std::uint64_t rank, std::uint64_t d,
                               std::uint64_t tokens) {
    const Group group = ep_group(layout, rank, d);
    ExchangeConfig exchange = expert_exchange_config(model, activation_type(shape.precision),
                                                     linear_precision(shape.precision));
    exchange.name = "experts";
    exchange.ranks = {group.ranks().begin(), group.ranks().end()};
    exchange.max_tokens = tokens;
    exchange.slots_per_rank = expert_slots_of_rank(model, shape, layout);
    if (exchange.slots_per_rank > 0)
        exchange.placements = model.moe_layers();
    if (shape.expert_sums == ExpertSums::PerChoice)
        exchange.sums = ExchangeSums::PerChoice;
    return exchange;
}

} // namespace bellows
