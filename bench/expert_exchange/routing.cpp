// SPDX-License-Identifier: MIT
#include "expert_exchange/routing.hpp"

#include "verify/reference/compare.hpp"

#include <algorithm>

namespace bellows::bench {

namespace {

using reference::Random;

/// The seed of a rank's tokens and of its routing.
std::uint64_t key_of(const ExchangeShape& shape, int rank, std::uint64_t purpose) {
    return Random(Random(shape.seed).bits() + 2 * static_cast<std::uint64_t>(rank) + purpose)
        .bits();
}

} // namespace

Routing::Routing(const ExchangeShape& shape, int rank) {
    Random random(key_of(shape, rank, 0));
    ids.reserve(shape.slots());
    weights.reserve(shape.slots());
    for (std::uint64_t token = 0; token < shape.tokens_of(rank); ++token) {
        const auto begin = static_cast<std::ptrdiff_t>(ids.size());
        // Floyd's sampling without repetition.
        for (std::uint64_t last = shape.experts - shape.top_k; last < shape.experts; ++last) {
            const auto drawn = static_cast<std::int32_t>(random.below(last + 1));
            const bool taken = std::find(ids.begin() + begin, ids.end(), drawn) != ids.end();
            ids.push_back(taken ? static_cast<std::int32_t>(last) : drawn);
            // Those that are multiplied with are small and whole, as tokens are.
            weights.push_back(shape.low_latency ? static_cast<float>(1 + random.below(2))
                                                : static_cast<float>(1 + random.below(64)) / 64);
        }
    }
}

std::vector<float> token_values(const ExchangeShape& shape, int rank, std::uint64_t token) {
    // top_k of them add up to no more than bf16 counts without a gap.
    const std::uint64_t counted = shape.low_latency ? 2 * shape.top_k : shape.top_k;
    const std::uint64_t most = std::min<std::uint64_t>(15, 256 / counted);
    Random random(key_of(shape, rank, 1) + token * 0x632be59bd9b4e019u);
    std::vector<float> values(shape.hidden);
    for (float& value : values)
        value = static_cast<float>(1 + random.below(most));
    return values;
}

std::vector<RowSource> expected_rows(const ExchangeShape& shape, std::uint64_t first,
                                     std::uint64_t count) {
    std::vector<std::vector<RowSource>> of_expert(count);
    for (int rank = 0; rank < static_cast<int>(shape.ranks); ++rank) {
        const Routing routing(shape, rank);
        for (std::uint64_t slot = 0; slot < routing.ids.size(); ++slot) {
            const auto expert = static_cast<std::uint64_t>(routing.ids[slot]);
            if (expert >= first && expert < first + count)
                of_expert[expert - first].push_back({static_cast<std::int64_t>(expert), rank,
                                                     slot / shape.top_k, routing.weights[slot]});
        }
    }
    std::vector<RowSource> rows;
    for (const auto& some : of_expert)
        rows.insert(rows.end(), some.begin(), some.end());
    return rows;
}

std::vector<RowSource> expected_tokens(const ExchangeShape& shape, std::uint64_t first,
                                       std::uint64_t count) {
    std::vector<RowSource> rows;
    for (int rank = 0; rank < static_cast<int>(shape.ranks); ++rank) {
        const Routing routing(shape, rank);
        for (std::uint64_t slot = 0; slot < routing.ids.size(); ++slot) {
            const auto expert = static_cast<std::uint64_t>(routing.ids[slot]);
            const RowSource row{-1, rank, slot / shape.top_k};
            const bool known =
                !rows.empty() && rows.back().rank == rank && rows.back().token == row.token;
            if (expert >= first && expert < first + count && !known)
                rows.push_back(row);
        }
    }
    return rows;
}

Traffic traffic_of(const ExchangeShape& shape, int rank, const Owner& owner) {
    Traffic traffic{std::vector<std::uint64_t>(shape.ranks),
                    std::vector<std::uint64_t>(shape.ranks)};
    const Routing routing(shape, rank);
    std::vector<std::uint64_t> last_token(shape.ranks, shape.tokens);
    for (std::uint64_t slot = 0; slot < routing.ids.size(); ++slot) {
        const auto to =
            static_cast<std::size_t>(owner(static_cast<std::uint64_t>(routing.ids[slot])));
        ++traffic.slots[to];
        traffic.records[to] += last_token[to] != slot / shape.top_k ? 1 : 0;
        last_token[to] = slot / shape.top_k;
    }
    return traffic;
}

} // namespace bellows::bench
