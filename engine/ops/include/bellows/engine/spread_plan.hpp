// SPDX-License-Identifier: MIT
#pragma once

// How a workgroup shares out a row that kernels with shaders/include/row_spread.glsl write to
// several places. A pure function, for the ops and for the exchange that launch them.

#include <cstdint>

namespace bellows {

struct SpreadPlan {
    std::uint32_t at_once = 1; ///< units that an invocation holds
    std::uint32_t parts = 1;   ///< of a row, each for a workgroup: the grid's y
    std::uint32_t slots_at_once = 8;
};

/// Of up to 8 units per invocation the number that leaves fewest idle, the largest of equals.
inline SpreadPlan plan_spread(std::uint64_t units, std::uint32_t local_size) {
    constexpr std::uint32_t kMost = 8, kMostParts = 65535;
    SpreadPlan plan;
    std::uint64_t least = ~std::uint64_t{0};
    for (std::uint32_t at_once = kMost; at_once > 0; --at_once) {
        const std::uint64_t width = std::uint64_t{local_size} * at_once;
        const std::uint64_t parts = (units + width - 1) / width;
        if (parts * width < least) {
            least = parts * width;
            plan.at_once = at_once;
            plan.parts = static_cast<std::uint32_t>(parts < kMostParts ? parts : kMostParts);
        }
    }
    return plan;
}

} // namespace bellows
