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

/// Code of a GPU's own instruction set, for devices whose driver launches it from Vulkan's command
/// buffers.
struct NativeCode {
    std::string_view text;           ///< of the module: PTX, which ends with a null byte
    std::string_view entry;          ///< the kernel's name in it
    std::uint32_t threads = 0;       ///< of a workgroup
    std::uint32_t shared_bytes = 0;  ///< that it asks for at its launch
    std::uint32_t scratch_bytes = 0; ///< device memory of each launch; its address stands behind
                                     ///< the operands' in the operand block
};

struct KernelVariant {
    std::string_view name;
    std::span<const std::uint32_t> spirv;       ///< empty when native, or not in this build
    std::span<const std::string_view> features; ///< device features it needs, see DeviceInfo
    std::string_view reason_not_built;          ///< why both spirv and native are empty
    NativeCode native = {};                     ///< in place of spirv
};

struct KernelInfo {
    std::string_view name;
    std::span<const KernelOperand> operands;
    std::span<const KernelConstant> constants; ///< constant_id = position
    std::span<const KernelVariant> variants;
    std::uint32_t push_words = 0; ///< 32-bit words after the 8-byte operand block address
};

} // namespace bellows
