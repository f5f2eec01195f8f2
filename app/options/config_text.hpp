// SPDX-License-Identifier: MIT
#pragma once

// `bellows config`: presets as configuration files for people. Pure functions.

#include <bellows/train/train_config.hpp>

#include <string>

namespace bellows {

/// A TOML file with every key of a configuration, each below a comment that says what it means.
std::string commented_toml(const RunConfig& config, const std::string& name);

} // namespace bellows
