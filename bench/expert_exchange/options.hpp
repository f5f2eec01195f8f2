// SPDX-License-Identifier: MIT
#pragma once

// What bench_expert_exchange measures, from its command line.

#include "support/common_options.hpp"
#include "support/program.hpp"

#include <bellows/base/dtype.hpp>
#include <bellows/comm/message.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace bellows::bench {

struct ExchangeShape {
    std::uint64_t ranks = 2;
    std::uint64_t tokens = 1024; ///< of each rank that has some
    std::uint64_t senders = 0;   ///< ranks that have: the first; 0: all
    std::uint64_t hidden = 7168;
    std::uint64_t experts = 256;
    std::uint64_t top_k = 8;
    DType dtype = DType::BF16;
    bool codes = false;   ///< tokens travel in FP8, with their scales
    bool by_rank = false; ///< rows arrive by source rank, a token once
    bool low_latency = false;
    DType sum_dtype = DType::BF16; ///< of sums on their way back
    bool exact_sums = false;
    std::uint64_t seed = 1;

    std::uint64_t tokens_of(int rank) const {
        return static_cast<std::uint64_t>(rank) < num_senders() ? tokens : 0;
    }
    std::uint64_t num_senders() const { return senders > 0 ? senders : ranks; }
    std::uint64_t slots() const { return tokens * top_k; } ///< of a rank that has tokens
    std::uint64_t row_bytes() const { return hidden * size_of(dtype); }
    /// Of a token on its way to the experts.
    std::uint64_t token_bytes() const {
        return codes ? hidden + (hidden + 127) / 128 * 4 : row_bytes();
    }
};
/// "2x1024x7168x256x8/bf16", "…/fp8/rank", "…/ll", "…/exact", "…/senders1"
std::string name_of(const ExchangeShape& shape);

struct ExchangeOptions {
    ExchangeShape shape;
    std::optional<int> ranks_per_node;
    bool flat = false; ///< once to each rank, not to each node
    DeviceLinkKind device_link = DeviceLinkKind::Auto;
    std::uint32_t workgroups = 0;
    std::uint64_t piece_kib = 0;      ///< ExchangeConfig::piece_bytes; 0: as it is
    std::uint64_t repeats = 5;        ///< at least
    CommonOptions filter;             ///< which rows are wanted
    std::vector<std::uint64_t> sweep; ///< tokens of each rank, one after the other
    double seconds = 0.5;             ///< of each phase, at least
    std::vector<std::string> devices; ///< of the ranks in turn; none: the environment's
    std::optional<std::vector<std::uint64_t>> beside; ///< groups, rows of each, n, k of products
    std::optional<std::string> json, trace;
};

extern const char* const kExchangeHelp;

/// Throws Error{InvalidArgument} for what it does not know and for values that do not fit.
ExchangeOptions take_exchange_options(Arguments& arguments);

} // namespace bellows::bench
