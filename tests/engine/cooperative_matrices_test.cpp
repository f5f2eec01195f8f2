// SPDX-License-Identifier: MIT

// Which devices have matrices of whole workgroups as the kernels want them, from what they
// enumerate.

#include "engine/runtime/matrices/cooperative_matrices.hpp"

#include <gtest/gtest.h>

namespace bellows::detail {
namespace {

/// A row as NVIDIA's driver has it.
WorkgroupSizes row(VkComponentTypeKHR type, std::uint32_t invocations, std::uint32_t m = 32,
                   std::uint32_t n = 32, std::uint32_t k = 16) {
    WorkgroupSizes sizes{};
    sizes.MGranularity = m;
    sizes.NGranularity = n;
    sizes.KGranularity = k;
    sizes.AType = sizes.BType = type;
    sizes.CType = sizes.ResultType = VK_COMPONENT_TYPE_FLOAT32_KHR;
    sizes.scope = VK_SCOPE_WORKGROUP_KHR;
    sizes.workgroupInvocations = invocations;
    return sizes;
}

VkPhysicalDeviceCooperativeMatrix2PropertiesNV limits(std::uint32_t invocations,
                                                      std::uint32_t dimension) {
    VkPhysicalDeviceCooperativeMatrix2PropertiesNV limits{};
    limits.cooperativeMatrixWorkgroupScopeMaxWorkgroupSize = invocations;
    limits.cooperativeMatrixFlexibleDimensionsMaxDimension = dimension;
    return limits;
}

constexpr auto kBf16 = VK_COMPONENT_TYPE_BFLOAT16_KHR;

TEST(EngineCooperativeMatrices, ARowServesWhoseStepsDivideTheTile) {
    const auto usual = limits(1024, 1024);
    EXPECT_TRUE(serve_workgroup_tiles({row(kBf16, 128)}, usual));
    EXPECT_TRUE(serve_workgroup_tiles(
        {row(VK_COMPONENT_TYPE_FLOAT16_KHR, 256), row(kBf16, 256), row(kBf16, 128, 64, 64, 64)},
        usual));
    EXPECT_FALSE(serve_workgroup_tiles({}, usual));
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 256)}, usual));
    EXPECT_FALSE(serve_workgroup_tiles({row(VK_COMPONENT_TYPE_FLOAT16_KHR, 128)}, usual));
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 128, 96)}, usual));
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 128, 32, 128)}, usual)); // not the narrow one
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 128, 32, 32, 128)}, usual));
}

TEST(EngineCooperativeMatrices, OtherScopesSumsAndSmallLimitsDoNot) {
    const auto usual = limits(1024, 1024);
    WorkgroupSizes other = row(kBf16, 128);
    other.scope = VK_SCOPE_SUBGROUP_KHR;
    EXPECT_FALSE(serve_workgroup_tiles({other}, usual));
    other = row(kBf16, 128);
    other.CType = other.ResultType = kBf16;
    EXPECT_FALSE(serve_workgroup_tiles({other}, usual));
    other = row(kBf16, 128);
    other.saturatingAccumulation = VK_TRUE;
    EXPECT_FALSE(serve_workgroup_tiles({other}, usual));
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 128)}, limits(64, 1024)));
    EXPECT_FALSE(serve_workgroup_tiles({row(kBf16, 128)}, limits(1024, 64)));
    EXPECT_TRUE(serve_workgroup_tiles({row(kBf16, 128)}, limits(128, 128)));
}

} // namespace
} // namespace bellows::detail
