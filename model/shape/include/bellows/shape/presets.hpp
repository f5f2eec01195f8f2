// SPDX-License-Identifier: MIT
#pragma once

// The model configurations that the program carries with it: the texts of model/presets/*.toml.

#include <bellows/shape/config.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// "tiny", "v2-lite", ..., in alphabetical order.
std::vector<std::string> preset_names();

/// A preset's whole TOML text. Throws Error{InvalidArgument} naming the nearest preset.
std::string_view preset_text(std::string_view name);

/// A preset's name or else a file's path. Throws as load_model_config(); if there is neither such a
/// preset nor such a file, Error{InvalidArgument} that lists the presets.
ModelConfig load_model(const std::string& preset_or_file,
                       const std::vector<std::string>& other_tables = {"train"});

} // namespace bellows
