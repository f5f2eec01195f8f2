// SPDX-License-Identifier: MIT
#include "physical_device.hpp"

#include "driver_defects.hpp"
#include "driver_files.hpp"
#include "matrices/cooperative_matrices.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

namespace bellows::detail {

namespace {

std::string version_string(std::uint32_t version) {
    return std::to_string(VK_API_VERSION_MAJOR(version)) + "." +
           std::to_string(VK_API_VERSION_MINOR(version)) + "." +
           std::to_string(VK_API_VERSION_PATCH(version));
}

std::string hex(const std::uint8_t* bytes, std::size_t count) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (std::size_t i = 0; i < count; ++i) {
        text += kDigits[bytes[i] >> 4];
        text += kDigits[bytes[i] & 15];
    }
    return text;
}

std::set<std::string> extensions_of(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    std::uint32_t count = 0;
    check(vki.vkEnumerateDeviceExtensionProperties(handle, nullptr, &count, nullptr),
          "listing device extensions");
    std::vector<VkExtensionProperties> properties(count);
    check(vki.vkEnumerateDeviceExtensionProperties(handle, nullptr, &count, properties.data()),
          "listing device extensions");
    std::set<std::string> names;
    for (const auto& property : properties)
        names.insert(property.extensionName);
    return names;
}

/// The extension by which the driver reads its own clock and the host's steady clock at one moment,
/// or null. Loaders may abort when a function is called for a device without its extension.
const char* clock_extension(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle,
                            const std::set<std::string>& extensions) {
    const char* extension = VK_KHR_CALIBRATED_TIMESTAMPS_EXTENSION_NAME;
    auto list = vki.vkGetPhysicalDeviceCalibrateableTimeDomainsKHR;
    if (extensions.count(extension) == 0) {
        extension = VK_EXT_CALIBRATED_TIMESTAMPS_EXTENSION_NAME;
        list = vki.vkGetPhysicalDeviceCalibrateableTimeDomainsEXT;
        if (extensions.count(extension) == 0)
            return nullptr;
    }
    std::uint32_t count = 0;
    if (list == nullptr || list(handle, &count, nullptr) != VK_SUCCESS)
        return nullptr;
    std::vector<VkTimeDomainKHR> domains(count);
    if (list(handle, &count, domains.data()) != VK_SUCCESS)
        return nullptr;
    const auto has = [&](VkTimeDomainKHR domain) {
        return std::find(domains.begin(), domains.end(), domain) != domains.end();
    };
    const bool both = has(VK_TIME_DOMAIN_DEVICE_KHR) && has(VK_TIME_DOMAIN_CLOCK_MONOTONIC_KHR);
    return both ? extension : nullptr;
}

/// Whether shaders may ask that f16 numbers below the least normal one are kept.
bool keeps_f16_subnormals(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    VkPhysicalDeviceFloatControlsProperties floats{};
    floats.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FLOAT_CONTROLS_PROPERTIES;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &floats;
    vki.vkGetPhysicalDeviceProperties2(handle, &properties);
    return floats.shaderDenormPreserveFloat16 == VK_TRUE;
}

std::uint64_t host_import_alignment(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    VkPhysicalDeviceExternalMemoryHostPropertiesEXT host{};
    host.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_MEMORY_HOST_PROPERTIES_EXT;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &host;
    vki.vkGetPhysicalDeviceProperties2(handle, &properties);
    return host.minImportedHostPointerAlignment;
}

bool imports_opaque_memory(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    VkPhysicalDeviceExternalBufferInfo info{};
    info.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_EXTERNAL_BUFFER_INFO;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                 VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
    info.handleType = VK_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD_BIT;
    VkExternalBufferProperties properties{};
    properties.sType = VK_STRUCTURE_TYPE_EXTERNAL_BUFFER_PROPERTIES;
    vki.vkGetPhysicalDeviceExternalBufferProperties(handle, &info, &properties);
    return (properties.externalMemoryProperties.externalMemoryFeatures &
            VK_EXTERNAL_MEMORY_FEATURE_IMPORTABLE_BIT) != 0;
}

/// GH100, the chip of H100, H200 and GH200, as PCI's list of devices has it.
bool is_hopper(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    constexpr std::uint32_t kNvidia = 0x10de, kHopper = 0x23;
    VkPhysicalDeviceProperties properties{};
    vki.vkGetPhysicalDeviceProperties(handle, &properties);
    return properties.vendorID == kNvidia && properties.deviceID >> 8 == kHopper;
}

std::uint32_t count_processors(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle) {
    VkPhysicalDeviceShaderSMBuiltinsPropertiesNV processors{};
    processors.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_SM_BUILTINS_PROPERTIES_NV;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &processors;
    vki.vkGetPhysicalDeviceProperties2(handle, &properties);
    return processors.shaderSMCount;
}

void describe(const volk::VolkInstanceTable& vki, PhysicalDevice& device) {
    VkPhysicalDeviceDriverProperties driver{};
    driver.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES;
    VkPhysicalDeviceIDProperties id{};
    id.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_ID_PROPERTIES;
    id.pNext = &driver;
    VkPhysicalDeviceSubgroupSizeControlProperties sizes{};
    sizes.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_SIZE_CONTROL_PROPERTIES;
    sizes.pNext = &id;
    VkPhysicalDeviceSubgroupProperties subgroup{};
    subgroup.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SUBGROUP_PROPERTIES;
    subgroup.pNext = &sizes;
    VkPhysicalDeviceProperties2 properties{};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &subgroup;
    vki.vkGetPhysicalDeviceProperties2(device.handle, &properties);

    const VkPhysicalDeviceProperties& p = properties.properties;
    DeviceInfo& info = device.info;
    info.name = p.deviceName;
    info.driver = std::string(driver.driverName) + " " + driver.driverInfo;
    info.uuid = hex(id.deviceUUID, VK_UUID_SIZE);
    info.api_version = version_string(p.apiVersion);
    info.is_cpu = p.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
    info.subgroup_size = subgroup.subgroupSize;
    device.may_shuffle = (subgroup.supportedStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0 &&
                         (subgroup.supportedOperations & VK_SUBGROUP_FEATURE_SHUFFLE_BIT) != 0;
    device.may_require_subgroup_size =
        (sizes.requiredSubgroupSizeStages & VK_SHADER_STAGE_COMPUTE_BIT) != 0;
    device.one_subgroup_size = sizes.minSubgroupSize == sizes.maxSubgroupSize;
    info.shared_memory_bytes = p.limits.maxComputeSharedMemorySize;
    info.max_workgroup_invocations = p.limits.maxComputeWorkGroupInvocations;
    info.max_workgroup_subgroups = sizes.maxComputeWorkgroupSubgroups;
    std::copy_n(p.limits.maxComputeWorkGroupCount, 3, info.max_workgroup_count.begin());
    info.timestamp_period_ns = p.limits.timestampPeriod;
    if (p.apiVersion < VK_API_VERSION_1_3)
        info.unmet_requirements.push_back("Vulkan 1.3 (it has " + info.api_version + ")");

    VkPhysicalDeviceMemoryProperties memory{};
    vki.vkGetPhysicalDeviceMemoryProperties(device.handle, &memory);
    for (std::uint32_t i = 0; i < memory.memoryHeapCount; ++i)
        if (memory.memoryHeaps[i].flags & VK_MEMORY_HEAP_DEVICE_LOCAL_BIT)
            info.memory_bytes =
                std::max<std::uint64_t>(info.memory_bytes, memory.memoryHeaps[i].size);

    std::uint32_t count = 0;
    vki.vkGetPhysicalDeviceQueueFamilyProperties(device.handle, &count, nullptr);
    device.queue_families.resize(count);
    vki.vkGetPhysicalDeviceQueueFamilyProperties(device.handle, &count,
                                                 device.queue_families.data());
    const bool compute = std::any_of(
        device.queue_families.begin(), device.queue_families.end(),
        [](const VkQueueFamilyProperties& f) { return f.queueFlags & VK_QUEUE_COMPUTE_BIT; });
    if (!compute)
        info.unmet_requirements.push_back("a compute queue");
    if (const std::string defect = known_crash(info); !defect.empty())
        info.unmet_requirements.push_back(defect);
}

} // namespace

FeatureChain::FeatureChain() {
    features.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
    v11.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES;
    v12.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES;
    v13.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_3_FEATURES;
    cooperative_matrix.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_FEATURES_KHR;
    cooperative_matrix2.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_COOPERATIVE_MATRIX_2_FEATURES_NV;
    bfloat16.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_BFLOAT16_FEATURES_KHR;
    features.pNext = &v11;
    v11.pNext = &v12;
    v12.pNext = &v13;
}

PhysicalDevice inspect(const volk::VolkInstanceTable& vki, VkPhysicalDevice handle,
                       std::uint32_t index) {
    PhysicalDevice device;
    device.handle = handle;
    device.info.index = index;
    describe(vki, device);
    device.enable = std::make_unique<FeatureChain>();
    if (!device.info.unmet_requirements.empty())
        return device;

    const std::set<std::string> extensions = extensions_of(vki, handle);
    FeatureChain has;
    void** tail = &has.v13.pNext;
    const auto chain = [&](const char* extension, auto& feature) {
        if (extensions.count(extension) == 0)
            return;
        *tail = &feature;
        tail = &feature.pNext;
    };
    chain(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME, has.cooperative_matrix);
    chain(VK_NV_COOPERATIVE_MATRIX_2_EXTENSION_NAME, has.cooperative_matrix2);
    chain(VK_KHR_SHADER_BFLOAT16_EXTENSION_NAME, has.bfloat16);
    vki.vkGetPhysicalDeviceFeatures2(handle, &has.features);

    FeatureChain& want = *device.enable;
    DeviceInfo& info = device.info;
    const auto need = [&](VkBool32 there, VkBool32& wanted, const char* name) {
        wanted = VK_TRUE;
        if (!there)
            info.unmet_requirements.push_back(name);
    };
    need(has.v12.bufferDeviceAddress, want.v12.bufferDeviceAddress, "bufferDeviceAddress");
    need(has.v12.timelineSemaphore, want.v12.timelineSemaphore, "timelineSemaphore");
    need(has.v12.scalarBlockLayout, want.v12.scalarBlockLayout, "scalarBlockLayout");
    need(has.v12.hostQueryReset, want.v12.hostQueryReset, "hostQueryReset");
    need(has.v13.synchronization2, want.v13.synchronization2, "synchronization2");
    need(has.v13.maintenance4, want.v13.maintenance4, "maintenance4");
    const auto offer = [&](VkBool32 there, VkBool32& wanted, const char* name) {
        wanted = there;
        if (there)
            info.features.push_back(name);
    };
    offer(has.features.features.shaderInt64, want.features.features.shaderInt64, "int64");
    offer(has.features.features.shaderInt16, want.features.features.shaderInt16, "int16");
    offer(has.v12.shaderFloat16, want.v12.shaderFloat16, "float16");
    offer(has.v12.shaderInt8, want.v12.shaderInt8, "int8");
    offer(has.v11.storageBuffer16BitAccess, want.v11.storageBuffer16BitAccess, "storage16");
    offer(has.v12.storageBuffer8BitAccess, want.v12.storageBuffer8BitAccess, "storage8");
    offer(has.v12.vulkanMemoryModel, want.v12.vulkanMemoryModel, "vulkan_memory_model");
    want.v12.vulkanMemoryModelDeviceScope = has.v12.vulkanMemoryModelDeviceScope;
    offer(has.v13.subgroupSizeControl, want.v13.subgroupSizeControl, "subgroup_size_control");
    want.v13.computeFullSubgroups = has.v13.computeFullSubgroups;
    const bool may_require = has.v13.subgroupSizeControl && has.v13.computeFullSubgroups &&
                             device.may_require_subgroup_size;
    if (may_require)
        info.features.push_back("required_subgroup_size");
    // For kernels that count on every subgroup being full and of DeviceInfo::subgroup_size.
    if (may_require || device.one_subgroup_size)
        info.features.push_back("fixed_subgroup_size");
    if (device.may_shuffle)
        info.features.push_back("subgroup_shuffle");
    if (keeps_f16_subnormals(vki, handle))
        info.features.push_back("float16_subnormals");

    if (extensions.count(VK_EXT_EXTERNAL_MEMORY_HOST_EXTENSION_NAME) != 0) {
        device.extensions.push_back(VK_EXT_EXTERNAL_MEMORY_HOST_EXTENSION_NAME);
        info.host_import_alignment = host_import_alignment(vki, handle);
    }

    if (extensions.count(VK_KHR_EXTERNAL_MEMORY_FD_EXTENSION_NAME) != 0) {
        device.extensions.push_back(VK_KHR_EXTERNAL_MEMORY_FD_EXTENSION_NAME);
        info.imports_opaque_memory = imports_opaque_memory(vki, handle);
    }

    // Needed by nothing that computes: the trace and the memory report are better with them.
    device.has_memory_budget = extensions.count(VK_EXT_MEMORY_BUDGET_EXTENSION_NAME) != 0;
    if (const char* extension = clock_extension(vki, handle, extensions)) {
        device.extensions.push_back(extension);
        info.features.push_back("calibrated_timestamps");
    }

    void** enable_tail = &want.v13.pNext;
    const auto enable = [&](const char* extension, auto& feature) {
        device.extensions.push_back(extension);
        *enable_tail = &feature;
        enable_tail = &feature.pNext;
    };
    if (has.cooperative_matrix.cooperativeMatrix) {
        want.cooperative_matrix.cooperativeMatrix = VK_TRUE;
        enable(VK_KHR_COOPERATIVE_MATRIX_EXTENSION_NAME, want.cooperative_matrix);
        info.features.push_back("cooperative_matrix");
        list_cooperative_matrices(vki, handle, info);
    }
    if (has.cooperative_matrix2.cooperativeMatrixWorkgroupScope &&
        has.cooperative_matrix2.cooperativeMatrixFlexibleDimensions &&
        has.cooperative_matrix2.cooperativeMatrixTensorAddressing) {
        want.cooperative_matrix2 = has.cooperative_matrix2;
        want.cooperative_matrix2.pNext = nullptr;
        enable(VK_NV_COOPERATIVE_MATRIX_2_EXTENSION_NAME, want.cooperative_matrix2);
        info.features.push_back("cooperative_matrix2");
        list_workgroup_matrices(vki, handle, has.cooperative_matrix2, info);
    }
    // For native kernels, which are there for one kind of GPU.
    if (is_hopper(vki, handle)) {
        info.features.push_back("hopper");
        if (extensions.count(VK_NVX_BINARY_IMPORT_EXTENSION_NAME) != 0) {
            device.extensions.push_back(VK_NVX_BINARY_IMPORT_EXTENSION_NAME);
            info.features.push_back(kBinaryImport);
        }
    }
    if (extensions.count(VK_NV_SHADER_SM_BUILTINS_EXTENSION_NAME) != 0)
        info.processors = count_processors(vki, handle);
    if (has.bfloat16.shaderBFloat16Type) {
        want.bfloat16 = has.bfloat16;
        want.bfloat16.pNext = nullptr;
        enable(VK_KHR_SHADER_BFLOAT16_EXTENSION_NAME, want.bfloat16);
        info.features.push_back("bfloat16");
        if (has.bfloat16.shaderBFloat16CooperativeMatrix)
            info.features.push_back("bfloat16_cooperative_matrix");
    }
    return device;
}

std::vector<PhysicalDevice> inspect_all(const Instance& instance) {
    std::uint32_t count = 0;
    const volk::VolkInstanceTable& vki = instance.functions();
    const VkResult listed = vki.vkEnumeratePhysicalDevices(instance.handle(), &count, nullptr);
    if (listed == VK_ERROR_INITIALIZATION_FAILED || listed == VK_ERROR_INCOMPATIBLE_DRIVER)
        throw Error(ErrorCode::Unsupported,
                    "no Vulkan driver could list its devices; " + drivers_tried(), -1, listed);
    check(listed, "listing Vulkan devices");
    std::vector<VkPhysicalDevice> handles(count);
    check(vki.vkEnumeratePhysicalDevices(instance.handle(), &count, handles.data()),
          "listing Vulkan devices");
    std::vector<PhysicalDevice> devices;
    for (std::uint32_t i = 0; i < count; ++i)
        devices.push_back(inspect(vki, handles[i], i));
    return devices;
}

namespace {

std::string list_of(const std::vector<PhysicalDevice>& devices) {
    std::string text;
    for (const PhysicalDevice& device : devices) {
        text += "\n  " + std::to_string(device.info.index) + ": " + device.info.name;
        for (const std::string& unmet : device.info.unmet_requirements)
            text += ", lacks " + unmet;
    }
    return text;
}

bool matches(const DeviceInfo& info, const std::string& select) {
    if (select.empty())
        return true;
    if (select == "cpu")
        return info.is_cpu;
    if (select == "gpu")
        return !info.is_cpu;
    std::string plain = select;
    std::erase(plain, '-');
    return plain == info.uuid || select == std::to_string(info.index);
}

} // namespace

PhysicalDevice choose(std::vector<PhysicalDevice> devices, const std::string& select) {
    PhysicalDevice* best = nullptr;
    for (PhysicalDevice& device : devices) {
        if (!matches(device.info, select) || !device.info.unmet_requirements.empty())
            continue;
        if (best == nullptr || (best->info.is_cpu && !device.info.is_cpu))
            best = &device;
    }
    if (devices.empty())
        throw Error(ErrorCode::Unsupported, "there is no Vulkan device; " + drivers_tried());
    if (best == nullptr)
        throw Error(ErrorCode::Unsupported,
                    "no Vulkan device serves" +
                        (select.empty() ? std::string() : " as \"" + select + "\"") +
                        ". Devices here:" + list_of(devices));
    return std::move(*best);
}

void require_serves(const DeviceInfo& info) {
    std::string lacks;
    for (const std::string& unmet : info.unmet_requirements)
        lacks += (lacks.empty() ? "" : ", ") + unmet;
    if (!lacks.empty())
        throw Error(ErrorCode::Unsupported, info.name + " (" + info.driver + ") lacks " + lacks +
                                                ": Bellows cannot use it; choose a device for "
                                                "which RequiredFeatures::unmet() is empty");
}

} // namespace bellows::detail

namespace bellows {

std::vector<DeviceInfo> list_devices() {
    std::vector<DeviceInfo> list;
    for (auto& device : detail::inspect_all(*detail::Instance::shared()))
        list.push_back(std::move(device.info));
    return list;
}

} // namespace bellows
