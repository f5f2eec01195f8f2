// SPDX-License-Identifier: MIT
#pragma once

// Compiled pipelines, one per (kernel, variant, specialisation constants), made on first use and
// cached on disk. Thread-safe.

#include "vulkan.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/kernel_info.hpp>

#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

namespace bellows::detail {

inline constexpr std::uint32_t kPushConstantBytes = 128;

class KernelCache {
public:
    explicit KernelCache(Device::Impl& device);
    ~KernelCache();

    /// Throws Error{Unsupported} with the reason when the variant cannot run here.
    VkPipeline pipeline(const KernelInfo& kernel, std::uint32_t variant,
                        std::span<const std::uint32_t> constants);
    /// The same of a native variant; its module is compiled when the first of its kernels is.
    VkCuFunctionNVX function(const KernelInfo& kernel, std::uint32_t variant);
    VkPipelineLayout layout() const noexcept { return layout_; }
    std::string why_not(const KernelInfo& kernel, std::uint32_t variant) const;
    void save();

private:
    struct Key {
        const KernelInfo* kernel;
        std::uint32_t variant;
        std::vector<std::uint32_t> constants;
        auto operator<=>(const Key&) const = default;
    };
    void require_runs(const KernelInfo& kernel, std::uint32_t variant) const;
    void compiled(const KernelInfo& kernel);
    VkCuModuleNVX module_of(const NativeCode& code);
    VkPipeline compile(const KernelInfo& kernel, const KernelVariant& variant,
                       std::span<const std::uint32_t> constants);
    /// What an earlier run kept, empty where there is none or it is not whole or not this device's.
    std::vector<char> kept() const;
    void load();

    Device::Impl& device_;
    VkPipelineLayout layout_ = VK_NULL_HANDLE;
    VkPipelineCache cache_ = VK_NULL_HANDLE;
    mutable std::mutex mutex_;
    std::map<Key, VkPipeline> pipelines_;
    std::map<const char*, VkCuModuleNVX> modules_; ///< by their text
    std::map<const KernelVariant*, VkCuFunctionNVX> functions_;
    bool changed_ = false;
    std::string path_; ///< "": in memory only
};

} // namespace bellows::detail
