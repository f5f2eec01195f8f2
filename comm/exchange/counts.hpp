// SPDX-License-Identifier: MIT
#pragma once

// How many slots of a dispatch go each route and choose each expert: counted on the device by
// blocks (ExchangeHandle::Impl::block_counts), summed on the host and told to the others.

#include "exchange_impl.hpp"

#include <bellows/engine/ops.hpp>

#include <cstdint>
#include <vector>

namespace bellows {

/// The blocks that so many tokens are counted by.
ops::MoeBlocks blocks_of(const ExchangeHandle::Impl& handle, std::uint64_t tokens);

/// Where the counts of so many tokens stand in block_counts.
struct BlockCounts {
    BlockCounts(const ExchangeHandle::Impl& handle, std::uint64_t tokens);

    ops::MoeBlocks blocks;
    BufferView routes, loads, all;
};

/// What each member is told before it is sent anything: rows of each origin, then rows per expert
/// of the receiver; from host_counts, of so many blocks.
std::vector<std::vector<std::uint32_t>> counts_for_members(const ExchangeHandle::Impl& handle,
                                                           std::uint64_t blocks);

} // namespace bellows
