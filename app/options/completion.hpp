// SPDX-License-Identifier: MIT
#pragma once

// `bellows completion bash`.

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace bellows {

/// A script that makes bash complete the commands, their flags, and the flags' values where these
/// are words, presets, files or folders.
std::string bash_completion(const std::vector<const CLI::App*>& commands);

} // namespace bellows
