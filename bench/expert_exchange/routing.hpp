// SPDX-License-Identifier: MIT
#pragma once

// What every rank hands in, worked out by any rank from the seed, and where it has to arrive: the
// plain reference of the exchange. Tokens are small whole numbers, so that sums over a token's
// experts are exact in every order and storage. Pure functions.

#include "expert_exchange/options.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace bellows::bench {

/// The rank that owns an expert.
using Owner = std::function<int(std::uint64_t expert)>;

/// Which experts a rank's tokens chose.
struct Routing {
    Routing(const ExchangeShape& shape, int rank);

    std::vector<std::int32_t> ids; ///< [tokens, top_k], all different within a token
    std::vector<float> weights;    ///< [tokens, top_k]
};

/// x of one token: [hidden].
std::vector<float> token_values(const ExchangeShape& shape, int rank, std::uint64_t token);

/// Where a row comes from.
struct RowSource {
    std::int64_t expert = -1; ///< -1: a row for all of the token's experts on a rank
    int rank = 0;
    std::uint64_t token = 0;
    float weight = 0;
    float times = 1; ///< how often the token is summed
};

/// The rows of experts [first, first + count) in the order (expert, rank, token).
std::vector<RowSource> expected_rows(const ExchangeShape& shape, std::uint64_t first,
                                     std::uint64_t count);

/// The tokens that have one of these experts, in the order (rank, token).
std::vector<RowSource> expected_tokens(const ExchangeShape& shape, std::uint64_t first,
                                       std::uint64_t count);

/// What a rank sends to each rank, itself among them.
struct Traffic {
    std::vector<std::uint64_t> slots;   ///< rows, one for each expert of a token
    std::vector<std::uint64_t> records; ///< tokens
};
Traffic traffic_of(const ExchangeShape& shape, int rank, const Owner& owner);

} // namespace bellows::bench
