// SPDX-License-Identifier: MIT
#include "kernel_cache.hpp"

#include "device_impl.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

namespace bellows::detail {

namespace {

/// Stands before the driver's data in the file. Drivers check little of what they are given, so a
/// truncated or changed file must not reach them.
struct FileHeader {
    char magic[8] = {'b', 'e', 'l', 'l', 'o', 'w', 's', '1'};
    std::uint64_t bytes = 0;
    std::uint64_t checksum = 0; ///< of the data

    bool operator==(const FileHeader&) const = default;
};

/// FNV-1a.
std::uint64_t checksum(std::string_view data) {
    std::uint64_t sum = 0xcbf29ce484222325u;
    for (const char byte : data)
        sum = (sum ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    return sum;
}

FileHeader header_of(const std::vector<char>& data) {
    FileHeader header;
    header.bytes = data.size();
    header.checksum = checksum({data.data(), data.size()});
    return header;
}

/// One file per device and driver: they would overwrite each other's.
std::string cache_path(const DeviceOptions& options, const DeviceInfo& info) {
    if (options.pipeline_cache_file.empty())
        return "";
    char key[17];
    std::snprintf(key, sizeof key, "%016llx",
                  static_cast<unsigned long long>(checksum(info.uuid + info.name + info.driver)));
    return options.pipeline_cache_file + "." + key;
}

} // namespace

KernelCache::KernelCache(Device::Impl& device)
    : device_(device), path_(cache_path(device.options, device.info)) {
    VkPushConstantRange range{VK_SHADER_STAGE_COMPUTE_BIT, 0, kPushConstantBytes};
    VkPipelineLayoutCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO;
    info.pushConstantRangeCount = 1;
    info.pPushConstantRanges = &range;
    check(device_.vk.vkCreatePipelineLayout(device_.device, &info, nullptr, &layout_),
          "creating the pipeline layout");
    load();
}

KernelCache::~KernelCache() {
    for (auto& [key, pipeline] : pipelines_)
        device_.vk.vkDestroyPipeline(device_.device, pipeline, nullptr);
    for (auto& [variant, function] : functions_)
        device_.vk.vkDestroyCuFunctionNVX(device_.device, function, nullptr);
    for (auto& [text, module] : modules_)
        device_.vk.vkDestroyCuModuleNVX(device_.device, module, nullptr);
    device_.vk.vkDestroyPipelineCache(device_.device, cache_, nullptr);
    device_.vk.vkDestroyPipelineLayout(device_.device, layout_, nullptr);
}

std::vector<char> KernelCache::kept() const {
    if (path_.empty())
        return {};
    constexpr std::uint64_t kLargestCache = std::uint64_t{1} << 30;
    std::string file;
    try {
        file = read_file(path_, kLargestCache);
    } catch (const Error&) { // there is none, or something else has its name
        return {};
    }
    FileHeader header;
    if (file.size() < sizeof header)
        return {};
    std::memcpy(&header, file.data(), sizeof header);
    std::vector<char> data(file.begin() + sizeof header, file.end());
    return header == header_of(data) ? data : std::vector<char>{};
}

void KernelCache::load() {
    const std::vector<char> data = kept();
    VkPipelineCacheCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_PIPELINE_CACHE_CREATE_INFO;
    info.initialDataSize = data.size(); // the driver refuses what is not its own
    info.pInitialData = data.data();
    VkResult result = device_.vk.vkCreatePipelineCache(device_.device, &info, nullptr, &cache_);
    if (result != VK_SUCCESS && !data.empty()) {
        info.initialDataSize = 0;
        result = device_.vk.vkCreatePipelineCache(device_.device, &info, nullptr, &cache_);
    }
    check(result, "creating the pipeline cache");
}

void KernelCache::save() {
    const std::scoped_lock lock(mutex_);
    if (path_.empty() || !changed_)
        return;
    std::size_t size = 0;
    check(device_.vk.vkGetPipelineCacheData(device_.device, cache_, &size, nullptr),
          "reading the pipeline cache");
    std::vector<char> data(size);
    check(device_.vk.vkGetPipelineCacheData(device_.device, cache_, &size, data.data()),
          "reading the pipeline cache");
    std::error_code ignored;
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), ignored);
    // Written aside and renamed, as several ranks share the file.
    const std::string temporary = path_ + "." + std::to_string(getpid()) + "." +
                                  std::to_string(reinterpret_cast<std::uintptr_t>(this)) + ".new";
    {
        data.resize(size); // it may have become less between the calls
        const FileHeader header = header_of(data);
        std::ofstream file(temporary, std::ios::binary);
        file.write(reinterpret_cast<const char*>(&header), sizeof header);
        file.write(data.data(), static_cast<std::streamsize>(size));
        if (!file.flush()) {
            std::filesystem::remove(temporary, ignored);
            return; // a cache that cannot be kept is no error
        }
    }
    std::error_code error;
    std::filesystem::rename(temporary, path_, error);
    if (error) // a folder has the name
        std::filesystem::remove(temporary, ignored);
    changed_ = false;
}

std::string KernelCache::why_not(const KernelInfo& kernel, std::uint32_t variant) const {
    if (variant >= kernel.variants.size())
        return "there is no such variant";
    const KernelVariant& chosen = kernel.variants[variant];
    if (chosen.spirv.empty() && chosen.native.text.empty())
        return "not built: " + std::string(chosen.reason_not_built);
    for (std::string_view feature : chosen.features)
        if (!device_.self.has_feature(feature))
            return "the device lacks " + std::string(feature);
    return "";
}

VkPipeline KernelCache::pipeline(const KernelInfo& kernel, std::uint32_t variant,
                                 std::span<const std::uint32_t> constants) {
    const Key key{&kernel, variant, {constants.begin(), constants.end()}};
    const std::scoped_lock lock(mutex_);
    if (const auto found = pipelines_.find(key); found != pipelines_.end())
        return found->second;
    require_runs(kernel, variant);
    const VkPipeline made = compile(kernel, kernel.variants[variant], constants);
    pipelines_.emplace(key, made);
    changed_ = true;
    compiled(kernel);
    return made;
}

void KernelCache::require_runs(const KernelInfo& kernel, std::uint32_t variant) const {
    if (const std::string reason = why_not(kernel, variant); !reason.empty())
        throw Error(ErrorCode::Unsupported, "kernel " + std::string(kernel.name) +
                                                " cannot run on " + device_.info.name + ": " +
                                                reason);
}

void KernelCache::compiled(const KernelInfo& kernel) {
    if (device_.options.on_pipeline_compiled)
        device_.options.on_pipeline_compiled(
            std::string(kernel.name),
            static_cast<std::uint32_t>(pipelines_.size() + functions_.size()));
}

VkCuFunctionNVX KernelCache::function(const KernelInfo& kernel, std::uint32_t variant) {
    const std::scoped_lock lock(mutex_);
    require_runs(kernel, variant);
    const KernelVariant& chosen = kernel.variants[variant];
    if (const auto found = functions_.find(&chosen); found != functions_.end())
        return found->second;
    VkCuFunctionCreateInfoNVX info{};
    info.sType = VK_STRUCTURE_TYPE_CU_FUNCTION_CREATE_INFO_NVX;
    info.module = module_of(chosen.native);
    info.pName = chosen.native.entry.data();
    VkCuFunctionNVX function = VK_NULL_HANDLE;
    check(device_.vk.vkCreateCuFunctionNVX(device_.device, &info, nullptr, &function),
          "loading kernel " + std::string(kernel.name) + "." + std::string(chosen.name));
    functions_.emplace(&chosen, function);
    compiled(kernel);
    return function;
}

VkCuModuleNVX KernelCache::module_of(const NativeCode& code) {
    if (const auto found = modules_.find(code.text.data()); found != modules_.end())
        return found->second;
    VkCuModuleCreateInfoNVX info{};
    info.sType = VK_STRUCTURE_TYPE_CU_MODULE_CREATE_INFO_NVX;
    info.dataSize = code.text.size() + 1; // the null byte ends PTX
    info.pData = code.text.data();
    VkCuModuleNVX module = VK_NULL_HANDLE;
    check(device_.vk.vkCreateCuModuleNVX(device_.device, &info, nullptr, &module),
          "compiling native kernel " + std::string(code.entry));
    modules_.emplace(code.text.data(), module);
    return module;
}

VkPipeline KernelCache::compile(const KernelInfo& kernel, const KernelVariant& variant,
                                std::span<const std::uint32_t> constants) {
    VkShaderModuleCreateInfo module_info{};
    module_info.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO;
    module_info.codeSize = variant.spirv.size_bytes();
    module_info.pCode = variant.spirv.data();
    const std::string name = std::string(kernel.name) + "." + std::string(variant.name);
    VkShaderModule module = VK_NULL_HANDLE;
    check(device_.vk.vkCreateShaderModule(device_.device, &module_info, nullptr, &module),
          "loading kernel " + name);

    std::vector<VkSpecializationMapEntry> entries;
    for (std::uint32_t i = 0; i < constants.size(); ++i)
        entries.push_back({i, i * 4, 4});
    const VkSpecializationInfo specialization{static_cast<std::uint32_t>(entries.size()),
                                              entries.data(), constants.size_bytes(),
                                              constants.data()};
    VkComputePipelineCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO;
    info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
    info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
    info.stage.module = module;
    info.stage.pName = "main";
    info.stage.pSpecializationInfo = &specialization;
    info.layout = layout_;
    VkPipelineShaderStageRequiredSubgroupSizeCreateInfo subgroup_size{};
    subgroup_size.sType =
        VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_REQUIRED_SUBGROUP_SIZE_CREATE_INFO;
    subgroup_size.requiredSubgroupSize = device_.info.subgroup_size;
    const bool fixed = std::find(variant.features.begin(), variant.features.end(),
                                 "fixed_subgroup_size") != variant.features.end();
    if (fixed && device_.self.has_feature("required_subgroup_size")) {
        info.stage.flags = VK_PIPELINE_SHADER_STAGE_CREATE_REQUIRE_FULL_SUBGROUPS_BIT;
        info.stage.pNext = &subgroup_size;
    }
    VkPipeline pipeline = VK_NULL_HANDLE;
    const VkResult result =
        device_.vk.vkCreateComputePipelines(device_.device, cache_, 1, &info, nullptr, &pipeline);
    device_.vk.vkDestroyShaderModule(device_.device, module, nullptr);
    check(result, "compiling kernel " + name);
    return pipeline;
}

} // namespace bellows::detail
