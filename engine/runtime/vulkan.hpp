// SPDX-License-Identifier: MIT
#pragma once

// Vulkan as the engine sees it: function tables per instance and device, and results as Errors.
// No function pointer is global. The build defines VOLK_NAMESPACE, which keeps the loader's names
// out of programs that link Bellows.

#include <volk.h>

#include <string_view>

namespace bellows::detail {

/// Throws Error for any result but VK_SUCCESS; `what` names the call and its object.
void check(VkResult result, std::string_view what);
const char* result_name(VkResult result) noexcept;

/// The system's loader, opened on first use and for good. Throws Error{Unsupported}.
PFN_vkGetInstanceProcAddr system_loader();
void load_instance_functions(volk::VolkInstanceTable& table, VkInstance instance,
                             PFN_vkGetInstanceProcAddr get);
void load_device_functions(volk::VolkDeviceTable& table, VkDevice device,
                           PFN_vkGetDeviceProcAddr get);

} // namespace bellows::detail
