// SPDX-License-Identifier: MIT
#pragma once

// How a rank opens its device.

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <string>

namespace bellows {

/// The devices of this machine, a line each under a line of titles: index, kind, UUID, name,
/// driver. Throws Error{Unsupported} where there is no Vulkan loader.
std::string device_table();
/// The same in one line, for errors: "0 (gpu, NVIDIA H200), 1 (cpu, llvmpipe)".
std::string device_names();

/// devices: see parse_devices(); ranks of a host take them in turn.
/// Compiled pipelines are kept in the user's cache folder. The environment's BELLOWS_* settings
/// apply.
DeviceOptions run_device_options(const std::string& devices, int local_rank);

/// How many of `local_ranks` ranks of a host share the device of one of them.
std::uint64_t ranks_per_device(const std::string& devices, int local_ranks);

/// What ranks on the device may take in all: its largest heap, or on a CPU, whose drivers make the
/// heap up, what the system has available.
std::uint64_t available_memory(const Device& device);

} // namespace bellows
