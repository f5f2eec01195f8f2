// SPDX-License-Identifier: MIT
#pragma once

// The clock of a device's units while it works, where that can be read.

#include <bellows/engine/device.hpp>

#include <optional>

namespace bellows::bench {

/// MHz at this moment: of CPU drivers the mean that the kernel shows for the processors; of GPUs
/// what their vendor's management library says, if it is there.
std::optional<double> clock_mhz(const DeviceInfo& info);

} // namespace bellows::bench
