// SPDX-License-Identifier: MIT
#pragma once

// JSON files of others, read with bounds. Pure functions.

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>

namespace bellows {

/// A JSON object. Throws Error{Corrupt} that names `file` where the text is no JSON, no object,
/// nested more than 16 deep, or has a key twice in one object.
nlohmann::json parse_object_strictly(std::string_view text, const std::string& file);

} // namespace bellows
