// SPDX-License-Identifier: MIT
#pragma once

// Bytes that exchanges take. Pure functions, without a device and without MPI: whoever plans a run
// calls them, too.

#include <bellows/comm/configuration.hpp>
#include <bellows/comm/topology.hpp>

#include <cstdint>

namespace bellows {

/// Bytes that ExpertExchange::create_handle() takes on a rank, exactly. Throws what the exchange's
/// construction would.
std::uint64_t exchange_handle_bytes(const Topology& topology, int rank,
                                    const ExchangeConfig& config);
/// About what a handle's first dispatch, and combine_backward, add to that in HighThroughput for
/// the records that they move (not for ExpertMajor's rows()): each rank hands in max_tokens, whose
/// router sends this rank `imbalance` times its even share. Throws as exchange_handle_bytes() does.
std::uint64_t exchange_record_bytes(const Topology& topology, int rank,
                                    const ExchangeConfig& config, double imbalance = 1.25);
/// The largest max_tokens, up to the configuration's, of which a handle takes no more than `bytes`;
/// 0 if one token's takes more. Across nodes one that fits, perhaps not the largest: so many tokens
/// that by_node() is not takes other memory. See ChunkedExchange. Throws as
/// exchange_handle_bytes() does.
std::uint64_t max_exchange_tokens(const Topology& topology, int rank, ExchangeConfig config,
                                  std::uint64_t bytes);

} // namespace bellows
