// SPDX-License-Identifier: MIT
#pragma once

// What an exchange costs the products that run while tokens travel, and how much of it they hide:
// FP8 grouped products on the compute queue between the halves of a call, as a layer of another
// micro-batch would run there. Their time is the device's own, by timestamps.

#include "expert_exchange/rig.hpp"
#include "ranks/timing.hpp"

#include <string>
#include <vector>

namespace bellows::bench {

struct BesideResult {
    std::string name;    ///< what ran beside the products; "" for nothing
    double products = 0; ///< seconds of the products on the device, median, of the slowest rank
    double seconds = 0;  ///< of all, from the call to the end of its wait, median
};

/// Alone, beside dispatch and beside combine, then the trace of one of each, where it is asked for.
/// Needs ExchangeOptions::beside. Collective; the rig has been dispatched and its results filled.
/// Throws Error{Internal} for a wrong product.
std::vector<BesideResult> time_beside(ExchangeRig& rig, Stopwatch& watch,
                                      const ExchangeOptions& options, const TimingOptions& timing);

} // namespace bellows::bench
