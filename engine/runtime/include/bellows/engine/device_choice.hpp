// SPDX-License-Identifier: MIT
#pragma once

// Which device a process opens: what a user may ask for, and how the ranks of a host take several
// in turn. Host only; from any thread.

#include <bellows/engine/device.hpp>

#include <string>
#include <string_view>
#include <vector>

namespace bellows {

/// The best device, of several alike another for each rank, or the one that BELLOWS_DEVICE names.
inline constexpr const char* kAnyDevice = "any";

/// "any", "gpu", "cpu", an index, a UUID, or several of these with commas between: ranks of a host
/// take them in turn. Throws Error{InvalidArgument}.
std::vector<std::string> parse_devices(std::string_view text);

/// The devices of this machine, a line each under a line of titles: index, kind, UUID, name,
/// driver. Throws Error{Unsupported} where there is no Vulkan loader.
std::string device_table();
/// The same in one line, for errors: "0 (gpu, NVIDIA H200), 1 (cpu, llvmpipe)".
std::string device_names();

/// The GPU of a rank where several of one name serve, those of the best one's; "" where there is no
/// choice.
std::string uuid_in_turn(const std::vector<DeviceInfo>& all, int local_rank);

/// devices: see parse_devices(); ranks of a host take them in turn, and where "any" or "gpu" leaves
/// a choice between several of one name, those.
/// Compiled pipelines are kept in the user's cache folder. The environment's BELLOWS_* settings
/// apply.
DeviceOptions device_options_of_rank(const std::string& devices, int local_rank);

} // namespace bellows
