// SPDX-License-Identifier: MIT
#pragma once

// How many ranks of a run share a device, and its memory.

#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

/// A rank's device and who else is on it.
struct DeviceShare {
    std::string name, driver; ///< as DeviceInfo has them
    std::string where;        ///< the same for ranks that share the device's memory
    bool is_cpu = false;
    std::uint64_t ranks = 0;     ///< of the run, on this device
    std::uint64_t available = 0; ///< bytes that all of them may take together
};

/// Collective; by rank, the same on all. Available is the device's budget, or on a CPU, whose
/// drivers make it up, what the system has.
std::vector<DeviceShare> device_shares(const Device& device, World& world);

/// One line, e.g. "2 of NVIDIA H200, gpu, driver NVIDIA 580.159: 4 ranks on each"; devices that
/// differ are named apart.
std::string describe_devices(const std::vector<DeviceShare>& shares);

} // namespace bellows
