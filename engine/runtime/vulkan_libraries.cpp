// SPDX-License-Identifier: MIT
// The implementations of volk and of the Vulkan Memory Allocator, compiled once. Of volk only the
// function tables are used: its global function pointers stay null, so that devices of different
// loaders live side by side in a process.

#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#pragma GCC diagnostic ignored "-Wpedantic"
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#pragma GCC diagnostic ignored "-Wparentheses"
#pragma GCC diagnostic ignored "-Wimplicit-fallthrough"

#include <dlfcn.h>
#include <string.h>
#include <vulkan/vulkan.h>

// Hidden in a shared library: a program may have a volk of its own, of another version. What it
// includes stands above.
#pragma GCC visibility push(hidden)
#define VOLK_IMPLEMENTATION
#include <volk.h>
#pragma GCC visibility pop

#include "vulkan.hpp"

#define VMA_STATIC_VULKAN_FUNCTIONS 0
#define VMA_DYNAMIC_VULKAN_FUNCTIONS 1
#define VMA_IMPLEMENTATION
#include "vma.hpp"

#include <bellows/base/error.hpp>

namespace bellows::detail {

namespace {

/// What volk's generated loaders carry to their callback.
template <class Handle, class Function>
struct Source {
    Handle handle;
    Function get;

    static PFN_vkVoidFunction load(void* source, const char* name) {
        const auto* self = static_cast<const Source*>(source);
        return self->get(self->handle, name);
    }
};

PFN_vkGetInstanceProcAddr open_loader() {
    void* library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr
                              : reinterpret_cast<PFN_vkGetInstanceProcAddr>(
                                    dlsym(library, "vkGetInstanceProcAddr"));
}

} // namespace

PFN_vkGetInstanceProcAddr system_loader() {
    static const PFN_vkGetInstanceProcAddr loader = open_loader();
    if (loader == nullptr)
        throw Error(ErrorCode::Unsupported,
                    "there is no Vulkan loader (libvulkan.so.1); install libvulkan1");
    return loader;
}

void load_instance_functions(volk::VolkInstanceTable& table, VkInstance instance,
                             PFN_vkGetInstanceProcAddr get) {
    Source<VkInstance, PFN_vkGetInstanceProcAddr> source{instance, get};
    table = {};
    volk::volkGenLoadInstanceTable(&table, &source, source.load);
}

void load_device_functions(volk::VolkDeviceTable& table, VkDevice device,
                           PFN_vkGetDeviceProcAddr get) {
    Source<VkDevice, PFN_vkGetDeviceProcAddr> source{device, get};
    table = {};
    volk::volkGenLoadDeviceTable(&table, &source, source.load);
}

} // namespace bellows::detail
