// SPDX-License-Identifier: MIT
#pragma once

// The matrices that a device multiplies, by subgroups (VK_KHR_cooperative_matrix) and by whole
// workgroups (VK_NV_cooperative_matrix2).

#include "runtime/vulkan.hpp"

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <vector>

namespace bellows::detail {

/// The tile of kernels whose workgroups multiply bf16 matrices together
/// (shaders/gemm_coopmat2_nt.comp).
struct WorkgroupTile {
    static constexpr std::uint32_t kRows = 128, kWide = 128, kNarrow = 64, kDepth = 64;
    static constexpr std::uint32_t kInvocations = 128;
};

/// The feature of devices that enumerate such products of bf16 with f32 sums, for matrices of every
/// size of WorkgroupTile.
inline constexpr const char* kWorkgroupMatrices = "coopmat2_bf16_f32";

/// Adds each row to info.cooperative_matrices, as "MxNxK a->c scope", and those of subgroups to
/// info.features, as kernel variants ask for them: "coopmat_f16_f32_16x16x16".
void list_cooperative_matrices(const volk::VolkInstanceTable& vki, VkPhysicalDevice device,
                               DeviceInfo& info);

using WorkgroupSizes = VkCooperativeMatrixFlexibleDimensionsPropertiesNV;

/// Whether a device with those rows and limits has the matrices that WorkgroupTile names.
bool serve_workgroup_tiles(const std::vector<WorkgroupSizes>& rows,
                           const VkPhysicalDeviceCooperativeMatrix2PropertiesNV& limits);

/// Adds the sizes to info.cooperative_matrices, as "multiples of MxNxK bf16->f32 workgroup of 128",
/// and kWorkgroupMatrices to info.features. `has`: features of the device, of which
/// cooperativeMatrixWorkgroupScope and cooperativeMatrixFlexibleDimensions are there.
void list_workgroup_matrices(const volk::VolkInstanceTable& vki, VkPhysicalDevice device,
                             const VkPhysicalDeviceCooperativeMatrix2FeaturesNV& has,
                             DeviceInfo& info);

} // namespace bellows::detail
