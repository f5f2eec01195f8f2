// SPDX-License-Identifier: MIT
#pragma once

// Which ranks of a training run do what together: stage s has the ranks s * dp to (s + 1) * dp - 1.
// Pure functions; d is a rank's position in its stage.

#include "app/checkpoint.hpp"
#include "app/train_config.hpp"

#include <bellows/comm/expert_exchange.hpp>
#include <bellows/comm/topology.hpp>

#include <cstdint>

namespace bellows {

/// A stage's ranks.
Group dp_group(const RunLayout& layout, std::uint64_t stage);
/// Those that share a layer's experts with this one.
Group ep_group(const RunLayout& layout, std::uint64_t stage, std::uint64_t d);
/// Those that hold copies of this rank's experts.
Group replica_group(const RunLayout& layout, std::uint64_t stage, std::uint64_t d);

/// The exchange of the tokens of a micro-batch, `tokens` on each rank, with the experts.
ExchangeConfig exchange_config(const RunConfig& config, const RunLayout& layout,
                               std::uint64_t stage, std::uint64_t d, std::uint64_t tokens);

} // namespace bellows
