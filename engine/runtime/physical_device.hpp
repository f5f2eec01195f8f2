// SPDX-License-Identifier: MIT
#pragma once

// Looking at physical devices: what they are, what they have, what Bellows lacks on them.

#include "instance.hpp"
#include "vulkan.hpp"

#include <bellows/engine/device.hpp>

#include <memory>
#include <string>
#include <vector>

namespace bellows::detail {

/// The feature of devices whose driver launches code of their own instruction set from command
/// buffers.
inline constexpr const char* kBinaryImport = "nvidia_binary_import";

/// The chain of feature structures that Bellows knows, filled with what it wants of a device.
struct FeatureChain {
    VkPhysicalDeviceFeatures2 features{};
    VkPhysicalDeviceVulkan11Features v11{};
    VkPhysicalDeviceVulkan12Features v12{};
    VkPhysicalDeviceVulkan13Features v13{};
    VkPhysicalDeviceCooperativeMatrixFeaturesKHR cooperative_matrix{};
    VkPhysicalDeviceCooperativeMatrix2FeaturesNV cooperative_matrix2{};
    VkPhysicalDeviceShaderBfloat16FeaturesKHR bfloat16{};

    FeatureChain();
    FeatureChain(const FeatureChain&) = delete;
    FeatureChain& operator=(const FeatureChain&) = delete;
};

struct PhysicalDevice {
    VkPhysicalDevice handle = VK_NULL_HANDLE;
    DeviceInfo info;
    std::unique_ptr<FeatureChain> enable; ///< to create a VkDevice with
    std::vector<const char*> extensions;
    bool may_require_subgroup_size = false; ///< of compute pipelines
    bool one_subgroup_size = false;         ///< the smallest is the largest
    bool may_shuffle = false;               ///< among a subgroup, in compute
    std::vector<VkQueueFamilyProperties> queue_families;
    bool has_memory_budget = false; ///< VK_EXT_memory_budget, which need not be enabled
};

PhysicalDevice inspect(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle,
                       std::uint32_t index);

std::vector<PhysicalDevice> inspect_all(const Instance& instance);

/// Throws Error{Unsupported} that names what the device lacks.
void require_serves(const DeviceInfo& info);

/// The device that `select` names (DeviceOptions::select). Throws Error{Unsupported} listing what
/// there is and why it does not serve.
PhysicalDevice choose(std::vector<PhysicalDevice> devices, const std::string& select);

} // namespace bellows::detail
