// SPDX-License-Identifier: MIT
#pragma once

// What is known of drivers by their reported name, version and properties. Pure functions.

#include <bellows/engine/device.hpp>

#include <optional>
#include <string>

namespace bellows::detail {

/// The major version of Mesa that the driver reports: 26 of "llvmpipe Mesa 26.2.6-1 (LLVM 22.1.8)".
/// Nothing for other drivers.
std::optional<int> mesa_version(const DeviceInfo& info);

/// What the device needs so that its driver does not crash on shaders that are valid, as an unmet
/// requirement; "" if nothing is known.
std::string known_crash(const DeviceInfo& info);

} // namespace bellows::detail
