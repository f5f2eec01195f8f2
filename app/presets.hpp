// SPDX-License-Identifier: MIT
#pragma once

// The configuration files of model/presets, compiled into the program (CMake writes presets.cpp).

#include <span>
#include <string_view>

namespace bellows {

struct Preset {
    std::string_view name; ///< e.g. "tiny"
    std::string_view text; ///< the file's content
};

/// Sorted by name.
std::span<const Preset> presets() noexcept;

} // namespace bellows
