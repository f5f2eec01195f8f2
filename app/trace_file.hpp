// SPDX-License-Identifier: MIT
#pragma once

// The trace of a run: one Chrome/Perfetto JSON with every rank (pid) and each of its queues, host
// lanes and message lanes (tid). `train` keeps the last two steps of a run.

#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// One rank's part of the file: its events, separated by commas.
std::string trace_of_rank(const std::vector<TraceEvent>& events, int rank);
/// The file, of all ranks' parts.
std::string trace_document(std::span<const std::string> ranks);

/// Collective: takes the device's events; rank 0 writes those of all ranks. Throws Error{Io}.
void write_trace(const std::filesystem::path& path, Device& device, World& world);

} // namespace bellows
