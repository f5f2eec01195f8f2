// SPDX-License-Identifier: MIT
#pragma once

// Whole-number rounding for sizes and grids, and equal shares. Pure functions, any thread.

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

/// One member's part of what is shared out over a group.
struct Share {
    std::uint64_t first = 0, count = 0;
};

/// Contiguous shares in the order of the members, the first count % members one element larger.
constexpr Share share_of(std::uint64_t count, std::uint64_t members,
                         std::uint64_t member) noexcept {
    const std::uint64_t each = count / members, more = count % members;
    return {member * each + (member < more ? member : more), each + (member < more ? 1 : 0)};
}

} // namespace bellows
