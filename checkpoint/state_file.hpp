// SPDX-License-Identifier: MIT
#pragma once

// state.json of a checkpoint as text and as values. The text carries a CRC-32 of itself.

#include <bellows/checkpoint/state.hpp>

#include <filesystem>
#include <map>
#include <string>

namespace bellows {

inline constexpr const char* kStateFile = "state.json";

std::string format_checkpoint_state(const CheckpointState& state,
                                    const std::map<std::string, CheckpointFile>& files);

/// Throws Error{Io}, Error{InvalidArgument} for the format of a later version, Error{Corrupt} for
/// anything else that format_checkpoint_state() does not write.
CheckpointState parse_checkpoint_state(const std::filesystem::path& path,
                                       std::map<std::string, CheckpointFile>& files);

} // namespace bellows
