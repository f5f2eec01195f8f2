// SPDX-License-Identifier: MIT
#pragma once

// The measured phases as a table and in Google Benchmark's JSON; one rank writes them.

#include "expert_exchange/beside.hpp"
#include "expert_exchange/options.hpp"
#include "support/spread.hpp"

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bellows::bench {

struct PhaseResult {
    std::string name;
    double seconds = 0; ///< median
    Spread spread;      ///< of the same
    std::optional<double> p99;
    double cpu_seconds = 0; ///< of all ranks together
    double bytes = 0;       ///< that algbw counts, mean of the ranks
    std::uint64_t repeats = 0;
    std::optional<double> sent;          ///< bytes to other ranks, of all ranks together
    std::optional<double> sent_to_nodes; ///< of those to ranks of other nodes
    std::optional<double> wire;          ///< bytes/s while records move, mean of the ranks
    std::optional<double> dedup, fp8;    ///< shares of bytes that need not travel
    std::optional<double> raw_seconds;   ///< of MPI_Alltoallv doing the same
};

/// The JSON's context; the table shows of it what is not the build's.
using Context = std::vector<std::pair<std::string, std::string>>;

/// What was measured with one number of tokens.
struct ShapeResults {
    ExchangeShape shape;
    std::vector<PhaseResult> phases;
    std::vector<BesideResult> beside;
};

/// Prints the table and writes options.json.
void write_results(const ExchangeOptions& options, const Context& context,
                   const std::vector<ShapeResults>& results);

} // namespace bellows::bench
