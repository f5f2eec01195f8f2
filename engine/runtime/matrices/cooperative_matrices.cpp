// SPDX-License-Identifier: MIT
#include "cooperative_matrices.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace bellows::detail {

namespace {

const char* component_name(VkComponentTypeKHR type) {
    switch (type) {
    case VK_COMPONENT_TYPE_FLOAT16_KHR:
        return "f16";
    case VK_COMPONENT_TYPE_FLOAT32_KHR:
        return "f32";
    case VK_COMPONENT_TYPE_FLOAT64_KHR:
        return "f64";
    case VK_COMPONENT_TYPE_SINT8_KHR:
        return "s8";
    case VK_COMPONENT_TYPE_UINT8_KHR:
        return "u8";
    case VK_COMPONENT_TYPE_SINT32_KHR:
        return "s32";
    case VK_COMPONENT_TYPE_UINT32_KHR:
        return "u32";
    case VK_COMPONENT_TYPE_BFLOAT16_KHR:
        return "bf16";
    case VK_COMPONENT_TYPE_FLOAT8_E4M3_EXT:
        return "e4m3";
    case VK_COMPONENT_TYPE_FLOAT8_E5M2_EXT:
        return "e5m2";
    default:
        return "other";
    }
}

std::vector<WorkgroupSizes> enumerate(const volk::VolkInstanceTable& vki, VkPhysicalDevice device) {
    const auto list = vki.vkGetPhysicalDeviceCooperativeMatrixFlexibleDimensionsPropertiesNV;
    std::uint32_t count = 0;
    if (list == nullptr || list(device, &count, nullptr) != VK_SUCCESS)
        return {};
    WorkgroupSizes empty{};
    empty.sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_FLEXIBLE_DIMENSIONS_PROPERTIES_NV;
    std::vector<WorkgroupSizes> rows(count, empty);
    if (list(device, &count, rows.data()) != VK_SUCCESS)
        return {};
    rows.resize(count);
    std::erase_if(rows,
                  [](const WorkgroupSizes& row) { return row.scope != VK_SCOPE_WORKGROUP_KHR; });
    return rows;
}

VkPhysicalDeviceCooperativeMatrix2PropertiesNV limits_of(const volk::VolkInstanceTable& vki,
                                                         VkPhysicalDevice device) {
    VkPhysicalDeviceCooperativeMatrix2PropertiesNV limits{};
    limits.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_2_PROPERTIES_NV;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &limits;
    vki.vkGetPhysicalDeviceProperties2(device, &properties);
    return limits;
}

/// Whether its matrices have all sizes of WorkgroupTile and its types.
bool serves_tiles(const WorkgroupSizes& row) {
    using Tile = WorkgroupTile;
    const auto divides = [](std::uint32_t step, std::uint32_t size) {
        return step != 0 && size % step == 0;
    };
    return row.scope == VK_SCOPE_WORKGROUP_KHR && row.AType == VK_COMPONENT_TYPE_BFLOAT16_KHR &&
           row.BType == row.AType && row.CType == VK_COMPONENT_TYPE_FLOAT32_KHR &&
           row.ResultType == row.CType && row.saturatingAccumulation == VK_FALSE &&
           row.workgroupInvocations == Tile::kInvocations &&
           divides(row.MGranularity, Tile::kRows) && divides(row.NGranularity, Tile::kWide) &&
           divides(row.NGranularity, Tile::kNarrow) && divides(row.KGranularity, Tile::kDepth);
}

} // namespace

void list_cooperative_matrices(const volk::VolkInstanceTable& vki, VkPhysicalDevice device,
                               DeviceInfo& info) {
    std::uint32_t count = 0;
    if (vki.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR(device, &count, nullptr) !=
        VK_SUCCESS)
        return;
    VkCooperativeMatrixPropertiesKHR empty{};
    empty.sType = VK_STRUCTURE_TYPE_COOPERATIVE_MATRIX_PROPERTIES_KHR;
    std::vector<VkCooperativeMatrixPropertiesKHR> rows(count, empty);
    if (vki.vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR(device, &count, rows.data()) !=
        VK_SUCCESS)
        return;
    for (const auto& row : rows) {
        const std::string a = component_name(row.AType), c = component_name(row.CType);
        const std::string shape = std::to_string(row.MSize) + "x" + std::to_string(row.NSize) +
                                  "x" + std::to_string(row.KSize);
        info.cooperative_matrices.push_back(
            shape + " " + a + "->" + c +
            (row.scope == VK_SCOPE_SUBGROUP_KHR ? " subgroup" : " workgroup"));
        if (row.AType == row.BType && row.CType == row.ResultType &&
            row.scope == VK_SCOPE_SUBGROUP_KHR)
            info.features.push_back("coopmat_" + a + "_" + c + "_" + shape);
    }
}

bool serve_workgroup_tiles(const std::vector<WorkgroupSizes>& rows,
                           const VkPhysicalDeviceCooperativeMatrix2PropertiesNV& limits) {
    using Tile = WorkgroupTile;
    return limits.cooperativeMatrixWorkgroupScopeMaxWorkgroupSize >= Tile::kInvocations &&
           limits.cooperativeMatrixFlexibleDimensionsMaxDimension >=
               std::max({Tile::kRows, Tile::kWide, Tile::kDepth}) &&
           std::any_of(rows.begin(), rows.end(), serves_tiles);
}

void list_workgroup_matrices(const volk::VolkInstanceTable& vki, VkPhysicalDevice device,
                             const VkPhysicalDeviceCooperativeMatrix2FeaturesNV& has,
                             DeviceInfo& info) {
    const std::vector<WorkgroupSizes> rows = enumerate(vki, device);
    for (const WorkgroupSizes& row : rows)
        info.cooperative_matrices.push_back(
            "multiples of " + std::to_string(row.MGranularity) + "x" +
            std::to_string(row.NGranularity) + "x" + std::to_string(row.KGranularity) + " " +
            component_name(row.AType) + "->" + component_name(row.CType) + " workgroup of " +
            std::to_string(row.workgroupInvocations));
    if (has.cooperativeMatrixTensorAddressing && has.cooperativeMatrixPerElementOperations &&
        serve_workgroup_tiles(rows, limits_of(vki, device)))
        info.features.emplace_back(kWorkgroupMatrices);
}

} // namespace bellows::detail
