// SPDX-License-Identifier: MIT
#pragma once

// For programs that bring their own Vulkan objects: what to enable, how to hand a device over, how
// to wrap buffers and timeline semaphores in both directions.

#include <bellows/engine/device.hpp>

#include <vulkan/vulkan_core.h>

#include <functional>
#include <span>
#include <vector>

namespace bellows {

/// Features that a VkDevice must have enabled for Bellows; chain `features` into
/// VkDeviceCreateInfo::pNext. Also holds the optional ones that `physical_device` has.
class RequiredFeatures {
public:
    /// get_instance_proc: of the loader that made `instance`; null uses the system's loader.
    RequiredFeatures(VkInstance instance, VkPhysicalDevice physical_device,
                     PFN_vkGetInstanceProcAddr get_instance_proc = nullptr);
    ~RequiredFeatures();
    const VkPhysicalDeviceFeatures2* features() const noexcept;
    std::span<const char* const> extensions() const noexcept;
    /// Empty when the device can serve.
    const std::vector<std::string>& unmet() const noexcept;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

struct ExternalQueue {
    VkQueue queue = VK_NULL_HANDLE;
    std::uint32_t family = 0;
    QueueRole role = QueueRole::Compute;
};

struct ExternalDevice {
    VkInstance instance = VK_NULL_HANDLE;
    VkPhysicalDevice physical_device = VK_NULL_HANDLE;
    VkDevice device = VK_NULL_HANDLE;
    /// At least one for QueueRole::Compute, which serves the roles that are left out, but for
    /// ComputeDeferredBeside, which ComputeDeferred's serves.
    std::vector<ExternalQueue> queues;
    /// True when the VkDevice was created without any queue of a family with graphics, also without
    /// those that are not handed over here. On NVIDIA its kernels may then use all of a processor's
    /// shared memory, and Bellows takes kernels that do. A wrong true loses the device.
    bool no_graphics_queue = false;
    PFN_vkGetInstanceProcAddr get_instance_proc = nullptr;
    /// Held around every vkQueueSubmit2 of Bellows; empty when nobody else uses the queues.
    std::function<void()> lock_queues, unlock_queues;
};

/// A buffer of the caller as a Bellows buffer. It must have been created with
/// VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT and the transfer and storage usages, and must outlive
/// the returned object and all work that uses it.
Buffer wrap_buffer(Device& device, VkBuffer buffer, std::uint64_t bytes, std::string name);

/// The Vulkan buffer and offset behind a view. Throws Error{InvalidArgument} when it is not bound.
struct VulkanRange {
    VkBuffer buffer = VK_NULL_HANDLE;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
};
VulkanRange vulkan_range(BufferView view);

/// A timeline semaphore and value of the caller as something to wait for. The caller has submitted
/// the operation that signals it, or will without waiting for Bellows.
TimePoint wrap_timeline(Device& device, VkSemaphore semaphore, std::uint64_t value);

/// The semaphore and value of a submitted time point. Throws Error{InvalidArgument} while the
/// pump holds it, and what it has failed with. Within a Gathering it may submit, so not under the
/// caller's queue lock then.
struct VulkanTimePoint {
    VkSemaphore semaphore = VK_NULL_HANDLE;
    std::uint64_t value = 0;
};
VulkanTimePoint vulkan_time_point(const TimePoint& point);

} // namespace bellows
