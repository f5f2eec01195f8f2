// SPDX-License-Identifier: MIT
#pragma once

// The table of presets, defined in a file that the build writes from presets/*.toml.

#include <span>
#include <string_view>

namespace bellows {

struct Preset {
    std::string_view name;
    std::string_view text;
};

/// In alphabetical order of the names.
std::span<const Preset> preset_table() noexcept;

} // namespace bellows
