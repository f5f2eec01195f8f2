// SPDX-License-Identifier: MIT
#pragma once

// Vulkan as the engine sees it: function tables per instance and device, and results as Errors. The
// build defines VOLK_NAMESPACE, which keeps the loader's names out of programs that link Bellows.

#include <volk.h>

#include <string_view>

namespace bellows::detail {

/// Throws Error for any result but VK_SUCCESS; `what` names the call and its object.
void check(VkResult result, std::string_view what);
const char* result_name(VkResult result) noexcept;

} // namespace bellows::detail
