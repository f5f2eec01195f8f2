// SPDX-License-Identifier: MIT
#include "instance.hpp"

#include "driver_files.hpp"

#include <bellows/base/error.hpp>

#include <mutex>

namespace bellows::detail {

Instance::Instance(bool validation) {
    const PFN_vkGetInstanceProcAddr get = system_loader();
    const auto create =
        reinterpret_cast<PFN_vkCreateInstance>(get(VK_NULL_HANDLE, "vkCreateInstance"));
    VkApplicationInfo application{};
    application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    application.pApplicationName = "bellows";
    application.apiVersion = VK_API_VERSION_1_3;
    VkInstanceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    info.pApplicationInfo = &application;
    const char* layer = "VK_LAYER_KHRONOS_validation";
    const char* extension = VK_EXT_DEBUG_UTILS_EXTENSION_NAME;
    if (validation) {
        info.enabledLayerCount = 1;
        info.ppEnabledLayerNames = &layer;
        info.enabledExtensionCount = 1;
        info.ppEnabledExtensionNames = &extension;
    }
    const VkResult result = create(&info, nullptr, &handle_);
    if (result == VK_ERROR_LAYER_NOT_PRESENT)
        throw Error(ErrorCode::Unsupported, "the Khronos validation layer is not installed "
                                            "(package vulkan-validationlayers)");
    if (result == VK_ERROR_INCOMPATIBLE_DRIVER || result == VK_ERROR_INITIALIZATION_FAILED)
        throw Error(ErrorCode::Unsupported, "no Vulkan driver can be used; " + drivers_tried(), -1,
                    result);
    check(result, "creating a Vulkan instance");
    load_instance_functions(functions_, handle_, get);
}

Instance::~Instance() {
    if (handle_ != VK_NULL_HANDLE)
        functions_.vkDestroyInstance(handle_, nullptr);
}

std::shared_ptr<const Instance> Instance::shared() {
    // Never destroyed: when a process ends, drivers may be gone before static objects are.
    static std::mutex* const mutex = new std::mutex;
    static auto* const kept = new std::shared_ptr<const Instance>;
    const std::scoped_lock lock(*mutex);
    if (*kept == nullptr)
        kept->reset(new Instance(false));
    return *kept;
}

std::shared_ptr<const Instance> Instance::with_validation() {
    shared();
    return std::shared_ptr<const Instance>(new Instance(true));
}

} // namespace bellows::detail
