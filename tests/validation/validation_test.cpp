// SPDX-License-Identifier: MIT
// The validation layer is there and is listened to: seeded mistakes must show. All other GPU
// programs run under it as validation.<test>.

#include "engine/runtime/device_impl.hpp"
#include "support/test_device.hpp"

#include <gtest/gtest.h>

#include <string>

namespace bellows {
namespace {

std::unique_ptr<Device> validated_device() {
    DeviceOptions options = testing::test_options();
    options.validation = true;
    return testing::make_device(options);
}

TEST(Validation, AMessageFailsTheDevice) {
    const auto device = validated_device();
    const Buffer buffer(*device, {.name = "buffer", .bytes = 64});
    Recording fill(*device, QueueRole::Compute, "fill");
    fill.fill(buffer.view(), 1);
    device->submit(fill).wait();
    VkBufferCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    info.usage = VK_BUFFER_USAGE_STORAGE_BUFFER_BIT; // and no size
    VkBuffer made = VK_NULL_HANDLE;
    Device::Impl& impl = device->impl();
    if (impl.vk.vkCreateBuffer(impl.device, &info, nullptr, &made) == VK_SUCCESS)
        impl.vk.vkDestroyBuffer(impl.device, made, nullptr);
    try {
        device->submit(fill);
        FAIL() << "the message was not heard";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Internal);
        EXPECT_NE(error.message().find("VUID-VkBufferCreateInfo-size-"), std::string::npos)
            << error.message();
    }
}

// Only the layer's own output can tell of what happens when a device is destroyed; this test's
// entry in ctest looks for it, all others must not have any.
TEST(Validation, DISABLED_WhatIsLeftBehindIsPrinted) {
    const auto device = validated_device();
    device->impl().create_timeline();
}

} // namespace
} // namespace bellows
