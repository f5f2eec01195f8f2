// SPDX-License-Identifier: MIT
#pragma once

// Which ranks of a training run do what together: rank r of the pipeline is the ranks r * dp to
// (r + 1) * dp - 1. Pure functions; d is a rank's position among these.

#include <bellows/comm/configuration.hpp>
#include <bellows/comm/topology.hpp>
#include <bellows/shape/layout.hpp>

#include <cstdint>
#include <vector>

namespace bellows {

/// Those that hold the same dense parameters, where `ranks` of the pipeline are copies.
Group dp_group(const RunLayout& layout, const std::vector<std::uint64_t>& ranks);
/// Those that share a layer's experts with this one.
Group ep_group(const RunLayout& layout, std::uint64_t rank, std::uint64_t d);
/// Those that hold copies of this rank's experts.
Group replica_group(const RunLayout& layout, const std::vector<std::uint64_t>& ranks,
                    std::uint64_t d);

/// How tokens of this type go to the experts of linear layers of this precision; name, ranks,
/// max_tokens (of a micro-batch on any of them) and times are the caller's. In FP8, as in
/// DeepSeek-V3, tokens and gradients are quantised once, before they travel, and weight gradients
/// take them from these codes, which stay where they came.
ExchangeConfig expert_exchange_config(const ModelConfig& config, DType activations,
                                      LinearPrecision precision);

/// The exchange of the tokens of a micro-batch, `tokens` on each rank, with the experts. Where
/// these are placed in slots, layer i's placement has the number i - dense_layers.
ExchangeConfig exchange_config(const ModelConfig& model, const TrainingShape& shape,
                               const RunLayout& layout, std::uint64_t rank, std::uint64_t d,
                               std::uint64_t tokens);

} // namespace bellows
