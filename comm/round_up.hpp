// SPDX-License-Identifier: MIT
#pragma once

#include <cstdint>

namespace bellows {

/// The least multiple of step that is not below value.
constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) noexcept {
    return (value + step - 1) / step * step;
}

} // namespace bellows
