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

/// Collective: rank 0 writes the events of all ranks. Throws Error{Io}.
void write_trace(const std::filesystem::path& path, const std::vector<TraceEvent>& events,
                 World& world);

} // namespace bellows
