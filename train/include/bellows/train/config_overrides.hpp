// SPDX-License-Identifier: MIT
#pragma once

// Keys of a configuration set one by one, as `--set train.lr=1e-3` does. Pure functions.

#include <bellows/train/train_config.hpp>

#include <filesystem>
#include <span>
#include <string>

namespace bellows {

/// Assignments "model.KEY=VALUE" or "train.KEY=VALUE" in their order, over `config`. A value is
/// typed as TOML; one that is no TOML is a text, so that quotes may be left out. Relative paths
/// start from `base`. The model is validated. Throws Error{InvalidArgument} that names an unknown
/// key with the nearest one, or what a key takes.
RunConfig with_overrides(const RunConfig& config, std::span<const std::string> assignments,
                         const std::filesystem::path& base);

} // namespace bellows
