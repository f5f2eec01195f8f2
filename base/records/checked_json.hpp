// SPDX-License-Identifier: MIT
#pragma once

// JSON files that carry a CRC-32 of themselves under "checksum". Pure functions.

#include <nlohmann/json.hpp>

#include <string>

namespace bellows {

/// Adds the check sum and writes it out, a value per line.
std::string format_checked(nlohmann::json json);

/// Throws Error{Corrupt} when it is nested deeper than ours is (writing it out again would use the
/// stack), nlohmann::json::exception when it is no JSON.
nlohmann::json parse_shallow(const std::string& text);

/// Throws Error{Corrupt} when the text does not fit its check sum, nlohmann::json::exception when
/// it has none.
void require_checksum(const nlohmann::json& json);

} // namespace bellows
