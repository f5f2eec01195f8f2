// SPDX-License-Identifier: MIT
#pragma once

// A program's own Vulkan: instance, device and buffers that Bellows has not made, for the tests of
// vulkan_interop.hpp, and host memory that ends at an unmapped page, for tests of what kernels
// touch. Chooses the device as BELLOWS_DEVICE says (a GPU or any).

#include "support/test_device.hpp"

#include <bellows/engine/vulkan_interop.hpp>

#include <gtest/gtest.h>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace bellows::testing {

class OwnVulkan {
public:
    OwnVulkan() {
        void* library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr)
            throw Error(ErrorCode::Unsupported, "no Vulkan loader");
        get = reinterpret_cast<PFN_vkGetInstanceProcAddr>(dlsym(library, "vkGetInstanceProcAddr"));
        VkApplicationInfo application{};
        application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
        application.apiVersion = VK_API_VERSION_1_3;
        VkInstanceCreateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
        info.pApplicationInfo = &application;
        check(call<PFN_vkCreateInstance>("vkCreateInstance", VK_NULL_HANDLE)(&info, nullptr,
                                                                             &instance));
        choose_device();
        create_device();
    }
    ~OwnVulkan() {
        call<PFN_vkDeviceWaitIdle>("vkDeviceWaitIdle")(device);
        for (const Block& block : blocks_) {
            call<PFN_vkDestroyBuffer>("vkDestroyBuffer")(device, block.buffer, nullptr);
            call<PFN_vkFreeMemory>("vkFreeMemory")(device, block.memory, nullptr);
            if (block.mapping != nullptr)
                munmap(block.mapping, block.mapping_bytes);
        }
        call<PFN_vkDestroyDevice>("vkDestroyDevice")(device, nullptr);
        call<PFN_vkDestroyInstance>("vkDestroyInstance")(instance, nullptr);
    }
    OwnVulkan(const OwnVulkan&) = delete;
    OwnVulkan& operator=(const OwnVulkan&) = delete;

    PFN_vkGetInstanceProcAddr get = nullptr;
    VkInstance instance = VK_NULL_HANDLE;
    VkPhysicalDevice physical_device = VK_NULL_HANDLE;
    VkDevice device = VK_NULL_HANDLE;
    VkQueue queue = VK_NULL_HANDLE;
    std::uint32_t family = 0;
    bool is_cpu = false;

    ExternalDevice external() const {
        return {.instance = instance,
                .physical_device = physical_device,
                .device = device,
                .queues = {{.queue = queue, .family = family, .role = QueueRole::Compute}},
                .get_instance_proc = get,
                .lock_queues = {},
                .unlock_queues = {}};
    }

    /// A Vulkan function of this instance, e.g. call<PFN_vkCreateSemaphore>("vkCreateSemaphore").
    template <class Function>
    Function call(const char* name) const {
        return call<Function>(name, instance);
    }

    VkSemaphore timeline() const {
        VkSemaphoreTypeCreateInfo type{};
        type.sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO;
        type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
        VkSemaphoreCreateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO;
        info.pNext = &type;
        VkSemaphore semaphore = VK_NULL_HANDLE;
        check(call<PFN_vkCreateSemaphore>("vkCreateSemaphore")(device, &info, nullptr, &semaphore));
        return semaphore;
    }
    void signal(VkSemaphore semaphore, std::uint64_t value) const {
        VkSemaphoreSignalInfo info{};
        info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO;
        info.semaphore = semaphore;
        info.value = value;
        check(call<PFN_vkSignalSemaphore>("vkSignalSemaphore")(device, &info));
    }
    void destroy(VkSemaphore semaphore) const {
        call<PFN_vkDestroySemaphore>("vkDestroySemaphore")(device, semaphore, nullptr);
    }

    VkBuffer buffer(std::uint64_t bytes) {
        Block block{.buffer = create_buffer(bytes, nullptr)};
        VkMemoryRequirements needs{};
        call<PFN_vkGetBufferMemoryRequirements>("vkGetBufferMemoryRequirements")(
            device, block.buffer, &needs);
        allocate(block, needs.size, needs.memoryTypeBits, nullptr);
        return block.buffer;
    }

    /// A buffer whose last byte is the last one before memory that may not be touched, with its
    /// bytes. On a CPU driver a kernel that reads beyond the buffer ends the program. A view may
    /// claim `beyond` more bytes: they belong to nothing else.
    struct Guarded {
        VkBuffer buffer = VK_NULL_HANDLE;
        std::uint64_t offset = 0; ///< of the wanted bytes; a multiple of 4 (16 where bytes are)
        std::byte* bytes = nullptr;
    };
    Guarded guarded(std::uint64_t bytes, std::uint64_t beyond = 0) {
        const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
        const std::uint64_t whole = (bytes + page - 1) / page * page;
        Block block{};
        block.mapping_bytes = whole + (beyond + page - 1) / page * page + page;
        block.mapping = mmap(nullptr, block.mapping_bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (block.mapping == MAP_FAILED)
            throw Error(ErrorCode::OutOfMemory, "mmap");
        auto* base = static_cast<std::byte*>(block.mapping);
        mprotect(base + whole, block.mapping_bytes - whole, PROT_NONE);
        VkExternalMemoryBufferCreateInfo external_info{};
        external_info.sType = VK_STRUCTURE_TYPE_EXTERNAL_MEMORY_BUFFER_CREATE_INFO;
        external_info.handleTypes = VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT;
        block.buffer = create_buffer(whole, &external_info);
        VkMemoryHostPointerPropertiesEXT properties{};
        properties.sType = VK_STRUCTURE_TYPE_MEMORY_HOST_POINTER_PROPERTIES_EXT;
        check(call<PFN_vkGetMemoryHostPointerPropertiesEXT>("vkGetMemoryHostPointerPropertiesEXT")(
            device, VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT, base, &properties));
        VkImportMemoryHostPointerInfoEXT import{};
        import.sType = VK_STRUCTURE_TYPE_IMPORT_MEMORY_HOST_POINTER_INFO_EXT;
        import.handleType = VK_EXTERNAL_MEMORY_HANDLE_TYPE_HOST_ALLOCATION_BIT_EXT;
        import.pHostPointer = base;
        allocate(block, whole, properties.memoryTypeBits, &import);
        return {block.buffer, whole - bytes, base + whole - bytes};
    }

private:
    struct Block {
        VkBuffer buffer = VK_NULL_HANDLE;
        VkDeviceMemory memory = VK_NULL_HANDLE;
        void* mapping = nullptr;
        std::uint64_t mapping_bytes = 0;
    };

    template <class Function>
    Function call(const char* name, VkInstance of) const {
        return reinterpret_cast<Function>(get(of, name));
    }
    static void check(VkResult result) {
        if (result != VK_SUCCESS)
            throw Error(ErrorCode::Vulkan, "a test's own Vulkan call failed", -1, result);
    }

    void choose_device() {
        std::uint32_t count = 0;
        const auto list = call<PFN_vkEnumeratePhysicalDevices>("vkEnumeratePhysicalDevices");
        check(list(instance, &count, nullptr));
        std::vector<VkPhysicalDevice> devices(count);
        check(list(instance, &count, devices.data()));
        const char* wanted = std::getenv("BELLOWS_DEVICE");
        const bool gpu = wanted != nullptr && std::strcmp(wanted, "gpu") == 0;
        for (VkPhysicalDevice candidate : devices) {
            VkPhysicalDeviceProperties properties{};
            call<PFN_vkGetPhysicalDeviceProperties>("vkGetPhysicalDeviceProperties")(candidate,
                                                                                     &properties);
            is_cpu = properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU;
            if (gpu && is_cpu)
                continue;
            if (!RequiredFeatures(instance, candidate, get).unmet().empty())
                continue;
            physical_device = candidate;
            return;
        }
        throw Error(ErrorCode::Unsupported, "no device serves the test");
    }

    void create_device() {
        const RequiredFeatures wanted(instance, physical_device, get);
        std::vector<const char*> extensions(wanted.extensions().begin(), wanted.extensions().end());
        extensions.push_back(VK_EXT_EXTERNAL_MEMORY_HOST_EXTENSION_NAME);
        std::uint32_t count = 0;
        const auto list = call<PFN_vkGetPhysicalDeviceQueueFamilyProperties>(
            "vkGetPhysicalDeviceQueueFamilyProperties");
        list(physical_device, &count, nullptr);
        std::vector<VkQueueFamilyProperties> families(count);
        list(physical_device, &count, families.data());
        while (!(families.at(family).queueFlags & VK_QUEUE_COMPUTE_BIT))
            ++family;
        const float priority = 1;
        VkDeviceQueueCreateInfo queue_info{};
        queue_info.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
        queue_info.queueFamilyIndex = family;
        queue_info.queueCount = 1;
        queue_info.pQueuePriorities = &priority;
        VkDeviceCreateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
        info.pNext = wanted.features();
        info.queueCreateInfoCount = 1;
        info.pQueueCreateInfos = &queue_info;
        info.enabledExtensionCount = static_cast<std::uint32_t>(extensions.size());
        info.ppEnabledExtensionNames = extensions.data();
        check(call<PFN_vkCreateDevice>("vkCreateDevice")(physical_device, &info, nullptr, &device));
        call<PFN_vkGetDeviceQueue>("vkGetDeviceQueue")(device, family, 0, &queue);
    }

    VkBuffer create_buffer(std::uint64_t bytes, const void* next) const {
        VkBufferCreateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
        info.pNext = next;
        info.size = bytes;
        info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT |
                     VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
        VkBuffer made = VK_NULL_HANDLE;
        check(call<PFN_vkCreateBuffer>("vkCreateBuffer")(device, &info, nullptr, &made));
        return made;
    }

    void allocate(Block& block, std::uint64_t bytes, std::uint32_t types, const void* next) {
        VkMemoryAllocateFlagsInfo flags{};
        flags.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO;
        flags.pNext = next;
        flags.flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT;
        VkMemoryAllocateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
        info.pNext = &flags;
        info.allocationSize = bytes;
        while (info.memoryTypeIndex < 31 && !(types >> info.memoryTypeIndex & 1))
            ++info.memoryTypeIndex;
        check(
            call<PFN_vkAllocateMemory>("vkAllocateMemory")(device, &info, nullptr, &block.memory));
        check(call<PFN_vkBindBufferMemory>("vkBindBufferMemory")(device, block.buffer, block.memory,
                                                                 0));
        blocks_.push_back(block);
    }

    std::vector<Block> blocks_;
};

} // namespace bellows::testing
