// SPDX-License-Identifier: MIT
#pragma once

// What the build knows about a kernel: operands and their accesses, specialisation constants,
// variants with their SPIR-V. Filled by the generated shader bank. Constant data.

#include <cstdint>
#include <span>
#include <string_view>

namespace bellows {

enum class Access : std::uint8_t { Read, Write, ReadWrite };

struct KernelOperand {
    std::string_view name;
    Access access = Access::Read;
};

struct KernelConstant {
    std::string_view name;
    std::uint32_t default_value = 0;
};

struct KernelVariant {
    std::string_view name;
    std::span<const std::uint32_t> spirv;       ///< empty when this build lacks the variant
    std::span<const std::string_view> features; ///< device features it needs, see DeviceInfo
    std::string_view reason_not_built;          ///< why spirv is empty
};

struct KernelInfo {
    std::string_view name;
    std::span<const KernelOperand> operands;
    std::span<const KernelConstant> constants; ///< constant_id = position
    std::span<const KernelVariant> variants;
    std::uint32_t push_words = 0; ///< 32-bit words after the 8-byte operand block address
};

} // namespace bellows
