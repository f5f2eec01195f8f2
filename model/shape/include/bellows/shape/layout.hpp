// SPDX-License-Identifier: MIT
#pragma once

// How a model is laid out over ranks. A plain value, the same on every rank.

#include <cstdint>

namespace bellows {

/// ranks = pp × dp, experts sharded over ep, a divisor of dp.
struct RunLayout {
    std::uint32_t pp = 1;
    std::uint32_t dp = 1;
    std::uint32_t ep = 1;
    bool operator==(const RunLayout&) const = default;
};

} // namespace bellows
