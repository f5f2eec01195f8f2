// SPDX-License-Identifier: MIT
#pragma once

// Why there is no Vulkan driver: which manifest files the loader was told of or looks for, and what
// is wrong with each. Only for errors; any thread.

#include <string>

namespace bellows::detail {

/// Sentences for the end of an error: which variable names the files (VK_DRIVER_FILES and the
/// like), each file with its fault, and what to do. Loads the drivers' libraries to see whether
/// they load.
std::string drivers_tried();

} // namespace bellows::detail
