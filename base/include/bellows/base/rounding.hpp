// SPDX-License-Identifier: MIT
#pragma once

// Whole-number rounding for sizes and grids. Pure functions, any thread.

#include <cstdint>

namespace bellows {

/// The least whole number that is not below value / divisor.
constexpr std::uint64_t div_up(std::uint64_t value, std::uint64_t divisor) noexcept {
    return (value + divisor - 1) / divisor;
}

/// The least multiple of step that is not below value.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) noexcept {
    return div_up(value, step) * step;
}

} // namespace bellows
