// SPDX-License-Identifier: MIT
#pragma once

// Tables that say which expert each slot holds, as `bellows plan experts --json` prints them. Host
// only, any thread.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// The tables of a file: {"physical_to_logical": [[an expert, or -1, of each slot] of each layer]};
/// other keys are not looked at. What the tables say is not checked: placements_of_tables() does.
/// Throws Error{Io}, Error{Corrupt} for what is no JSON object, Error{InvalidArgument} that names
/// the file and the place.
std::vector<std::vector<std::int32_t>> read_expert_tables(const std::filesystem::path& file);
/// Returns the tables of a text, which errors call `name`.
std::vector<std::vector<std::int32_t>> parse_expert_tables(std::string_view text,
                                                           const std::string& name);

} // namespace bellows
