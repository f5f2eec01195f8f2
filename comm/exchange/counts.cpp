// SPDX-License-Identifier: MIT
#include "counts.hpp"

#include <span>

namespace bellows {

namespace {

using Handle = ExchangeHandle::Impl;

/// Sums over blocks: [blocks, count].
std::vector<std::uint32_t> sums_of_blocks(std::span<const std::uint32_t> blocks,
                                          std::uint64_t count) {
    std::vector<std::uint32_t> sums(count);
    for (std::uint64_t first = 0; first < blocks.size(); first += count)
        for (std::uint64_t i = 0; i < count; ++i)
            sums[i] += blocks[first + i];
    return sums;
}

} // namespace

ops::MoeBlocks blocks_of(const Handle& handle, std::uint64_t tokens) {
    return ops::moe_blocks(tokens * handle.exchange.config.top_k);
}

BlockCounts::BlockCounts(const Handle& handle, std::uint64_t tokens)
    : blocks(blocks_of(handle, tokens)),
      routes(handle.block_counts.view().sub(0, blocks.count * handle.exchange.routes() * 4)),
      loads(handle.block_counts.view().sub(routes.bytes,
                                           blocks.count * handle.exchange.config.num_experts * 4)),
      all(handle.block_counts.view().sub(0, routes.bytes + loads.bytes)) {
}

std::vector<std::vector<std::uint32_t>> counts_for_members(const Handle& handle,
                                                           std::uint64_t blocks) {
    const ExpertExchange::Impl& exchange = handle.exchange;
    const ExchangeConfig& config = exchange.config;
    const std::uint64_t members = exchange.group_size(), origins = exchange.origins;
    const auto all = handle.host_counts.mapped_as<const std::uint32_t>();
    const std::uint64_t of_routes = blocks * exchange.routes();
    const auto all_rows = sums_of_blocks(all.first(of_routes), exchange.routes());
    const auto all_loads =
        sums_of_blocks(all.subspan(of_routes, blocks * config.num_experts), config.num_experts);
    std::vector<std::vector<std::uint32_t>> messages(members);
    for (std::uint64_t at = 0; at < members; ++at) {
        const auto rows = std::span(all_rows).subspan(at * origins, origins);
        const auto loads =
            std::span(all_loads).subspan(exchange.first_expert_of(at), exchange.experts_of(at));
        messages[at].assign(rows.begin(), rows.end());
        messages[at].insert(messages[at].end(), loads.begin(), loads.end());
    }
    return messages;
}

} // namespace bellows
