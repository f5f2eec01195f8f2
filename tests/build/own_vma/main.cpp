// SPDX-License-Identifier: MIT
// A program that compiles an allocator of its own and links the one in Bellows, too: neither takes
// the other's functions.
#include <bellows/engine/device.hpp>

#define VMA_STATIC_VULKAN_FUNCTIONS 0
#define VMA_DYNAMIC_VULKAN_FUNCTIONS 1
#define VMA_IMPLEMENTATION
#pragma GCC diagnostic ignored "-Wall"
#pragma GCC diagnostic ignored "-Wextra"
#include <vk_mem_alloc.h>

#include <cstdio>

int main() {
    VmaVirtualBlockCreateInfo info{};
    info.size = 1 << 20;
    VmaVirtualBlock block = VK_NULL_HANDLE;
    if (vmaCreateVirtualBlock(&info, &block) != VK_SUCCESS)
        return 1;
    vmaDestroyVirtualBlock(block);
    const auto device = bellows::Device::create({});
    const bellows::Buffer buffer(*device, {.name = "own", .bytes = 1 << 20});
    std::printf("both allocators serve, on %s\n", device->info().name.c_str());
    return buffer.size() == 1 << 20 ? 0 : 1;
}
