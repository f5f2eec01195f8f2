// SPDX-License-Identifier: MIT
#pragma once

// How a rank opens its device.

#include <bellows/engine/device.hpp>

#include <string>

namespace bellows {

/// devices: see parse_devices(); ranks of a host take them in turn. Compiled pipelines are kept in
/// the user's cache folder. The environment's BELLOWS_* settings apply.
DeviceOptions run_device_options(const std::string& devices, int local_rank);

} // namespace bellows
