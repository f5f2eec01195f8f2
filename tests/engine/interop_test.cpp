// SPDX-License-Identifier: MIT
// A program's own Vulkan objects with Bellows: device, queue lock, buffers and timelines in both
// directions; and what an Error says when such a device is lost.

#include "support/own_vulkan.hpp"

#include <bellows/engine/lane.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <numeric>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace bellows {
namespace {

using testing::make_device;
using testing::OwnVulkan;
using testing::read_back;
using testing::test_options;

std::vector<std::uint32_t> ascending(std::uint64_t count) {
    std::vector<std::uint32_t> values(count);
    std::iota(values.begin(), values.end(), 3u);
    return values;
}

TEST(EngineInterop, AnAdoptedDeviceComputesOnTheCallersBuffer) {
    OwnVulkan own;
    const VkBuffer handle = own.buffer(4096);
    const auto device = Device::adopt(own.external(), test_options());
    {
        const Buffer wrapped = wrap_buffer(*device, handle, 4096, "the caller's");
        EXPECT_EQ(wrapped.size(), 4096u);
        const VulkanRange range = vulkan_range(wrapped.view().sub(256, 64));
        EXPECT_EQ(range.buffer, handle);
        EXPECT_EQ(range.offset, 256u);
        EXPECT_EQ(range.bytes, 64u);
        const auto values = ascending(1024);
        device->upload(wrapped.view(), std::span<const std::uint32_t>(values));
        const Buffer copy(*device, {.name = "copy", .bytes = 4096});
        Recording recording(*device, QueueRole::TransferOut, "copy"); // a role that was not given
        recording.copy(wrapped.view(), copy.view());
        device->submit(recording).wait();
        EXPECT_EQ(read_back<std::uint32_t>(*device, copy.view()), values);
    }
    EXPECT_FALSE(device->distinct_queues(QueueRole::Compute, QueueRole::TransferOut));
}

TEST(EngineInterop, AForeignLoaderDoesNotDisturbOtherDevices) {
    // Whatever `adopt` was given last, each device keeps its own functions.
    const auto before = make_device();
    OwnVulkan own;
    const auto adopted = Device::adopt(own.external(), test_options());
    const auto after = make_device();
    for (Device* device : {before.get(), adopted.get(), after.get()}) {
        const Buffer buffer(*device, {.name = "values", .bytes = 400});
        const auto values = ascending(100);
        device->upload(buffer.view(), std::span<const std::uint32_t>(values));
        EXPECT_EQ(read_back<std::uint32_t>(*device, buffer.view()), values);
    }
}

TEST(EngineInterop, QueuesAreUsedOnlyUnderTheCallersLock) {
    OwnVulkan own;
    ExternalDevice external = own.external();
    int depth = 0, rounds = 0;
    external.lock_queues = [&] { EXPECT_EQ(depth++, 0); };
    external.unlock_queues = [&] {
        EXPECT_EQ(--depth, 0);
        ++rounds;
    };
    const auto device = Device::adopt(external, test_options());
    const Buffer buffer(*device, {.name = "values", .bytes = 64});
    EXPECT_EQ(rounds, 1); // it has been poisoned
    Recording recording(*device, QueueRole::Compute, "fill");
    recording.fill(buffer.view(), 5);
    for (int i = 0; i < 3; ++i)
        device->submit(recording).wait();
    EXPECT_EQ(depth, 0);
    EXPECT_EQ(rounds, 4);
}

TEST(EngineInterop, TheCallerSaysThatItsDeviceHasNoQueueWithGraphics) {
    OwnVulkan own;
    EXPECT_FALSE(Device::adopt(own.external(), test_options())->has_feature("no_graphics_queue"));
    ExternalDevice external = own.external();
    external.no_graphics_queue = true;
    std::vector<VkQueueFamilyProperties> families(16);
    std::uint32_t count = 16;
    own.call<PFN_vkGetPhysicalDeviceQueueFamilyProperties>(
        "vkGetPhysicalDeviceQueueFamilyProperties")(own.physical_device, &count, families.data());
    if (families.at(own.family).queueFlags & VK_QUEUE_GRAPHICS_BIT) // it is not believed
        EXPECT_THROW(Device::adopt(external, test_options()), Error);
    else
        EXPECT_TRUE(Device::adopt(external, test_options())->has_feature("no_graphics_queue"));
}

TEST(EngineInterop, TimelinesGoInAndOut) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    {
        DeviceOptions options = test_options();
        options.sync = SyncMode::Overlap; // shuffling holds work back until somebody waits
        const auto device = Device::adopt(own.external(), options);
        const Buffer buffer(*device, {.name = "values", .bytes = 64});
        Recording recording(*device, QueueRole::Compute, "fill");
        recording.fill(buffer.view(), 5);
        const TimePoint signalled = wrap_timeline(*device, semaphore, 7);
        EXPECT_EQ(signalled.state(), TimePoint::State::Pending);
        const TimePoint filled = device->submit(recording, std::array{signalled});
        const VulkanTimePoint out = vulkan_time_point(filled);
        EXPECT_NE(out.semaphore, semaphore);
        std::uint64_t value = ~std::uint64_t{0};
        const auto read = own.call<PFN_vkGetSemaphoreCounterValue>("vkGetSemaphoreCounterValue");
        ASSERT_EQ(read(own.device, out.semaphore, &value), VK_SUCCESS);
        EXPECT_LT(value, out.value); // the device waits for the caller
        EXPECT_FALSE(filled.reached());
        own.signal(semaphore, 7);
        filled.wait(std::chrono::seconds(20));
        EXPECT_TRUE(signalled.reached());
        ASSERT_EQ(read(own.device, out.semaphore, &value), VK_SUCCESS);
        EXPECT_GE(value, out.value);
    }
    own.destroy(semaphore);
}

/// Also of jobs that had ended before anybody asked for their semaphore.
TEST(EngineInterop, TheSemaphoreOfALaneSaysWhatHasEnded) {
    OwnVulkan own;
    const auto device = Device::adopt(own.external(), test_options());
    const auto read = own.call<PFN_vkGetSemaphoreCounterValue>("vkGetSemaphoreCounterValue");
    HostThread thread(*device, "thread");
    Lane lane = thread.add_lane("lane");
    const auto value_of = [&](const TimePoint& point) {
        std::uint64_t value = ~std::uint64_t{0};
        EXPECT_EQ(read(own.device, vulkan_time_point(point).semaphore, &value), VK_SUCCESS);
        return value;
    };
    TimePoint last;
    const auto run = [&] {
        last = lane.post({.name = "job", .waits = {}, .accesses = {}, .step = [](LaneContext&) {
                              return Progress::Done;
                          }});
        last.wait(std::chrono::seconds(20));
    };
    run();
    run();
    EXPECT_EQ(value_of(last), vulkan_time_point(last).value);
    run();
    EXPECT_EQ(value_of(last), vulkan_time_point(last).value);
    EXPECT_EQ(vulkan_time_point(last).value, 3u);
}

TEST(EngineInterop, RequiredFeaturesAreAllThatADeviceNeeds) {
    OwnVulkan own; // made with them
    const RequiredFeatures wanted(own.instance, own.physical_device, own.get);
    EXPECT_TRUE(wanted.unmet().empty());
    EXPECT_EQ(wanted.features()->sType, VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2);
    const auto adopted = Device::adopt(own.external(), {});
    const auto created = make_device();
    if (adopted->info().uuid == created->info().uuid) {
        EXPECT_EQ(adopted->info().features, created->info().features);
    }
}

/// A loader whose devices lack two features that Bellows needs.
struct Lacking {
    static inline PFN_vkGetInstanceProcAddr real = nullptr;
    static inline PFN_vkGetPhysicalDeviceFeatures2 real_features = nullptr;

    static VKAPI_ATTR void VKAPI_CALL features(VkPhysicalDevice device,
                                               VkPhysicalDeviceFeatures2* out) {
        real_features(device, out);
        for (auto* next = static_cast<VkBaseOutStructure*>(out->pNext); next != nullptr;
             next = next->pNext) {
            if (next->sType != VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_2_FEATURES)
                continue;
            auto* v12 = reinterpret_cast<VkPhysicalDeviceVulkan12Features*>(next);
            v12->timelineSemaphore = v12->scalarBlockLayout = VK_FALSE;
        }
    }
    static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL get(VkInstance instance, const char* name) {
        if (std::string_view(name) != "vkGetPhysicalDeviceFeatures2")
            return real(instance, name);
        real_features = reinterpret_cast<PFN_vkGetPhysicalDeviceFeatures2>(real(instance, name));
        return reinterpret_cast<PFN_vkVoidFunction>(&features);
    }
};

TEST(EngineInterop, ADeviceThatLacksWhatIsNeededIsRefusedByName) {
    OwnVulkan own;
    Lacking::real = own.get;
    const RequiredFeatures wanted(own.instance, own.physical_device, Lacking::get);
    EXPECT_EQ(wanted.unmet(), (std::vector<std::string>{"timelineSemaphore", "scalarBlockLayout"}));
    ExternalDevice external = own.external();
    external.get_instance_proc = Lacking::get;
    try {
        Device::adopt(external, test_options());
        FAIL() << "it was adopted";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
        EXPECT_NE(error.message().find("lacks timelineSemaphore, scalarBlockLayout"),
                  std::string::npos)
            << error.message();
    }
    external = own.external();
    external.queues.front().family = 1000;
    try {
        Device::adopt(external, test_options());
        FAIL() << "a queue family that the device does not have was taken";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("family 1000"), std::string::npos) << error.message();
    }
}

TEST(EngineInterop, ALaneJobWaitsForTheCallersTimeline) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    {
        const auto device = Device::adopt(own.external(), test_options());
        HostThread thread(*device, "host");
        Lane lane = thread.add_lane("lane");
        std::atomic<bool> began{false};
        const TimePoint done = lane.post({.name = "job",
                                          .waits = {wrap_timeline(*device, semaphore, 3)},
                                          .accesses = {},
                                          .step =
                                              [&](LaneContext&) {
                                                  began = true;
                                                  return Progress::Done;
                                              },
                                          .timeout = std::chrono::seconds(20)});
        own.signal(semaphore, 2);
        EXPECT_THROW(done.wait(std::chrono::milliseconds(50)), Error);
        EXPECT_FALSE(began);
        own.signal(semaphore, 3);
        done.wait(std::chrono::seconds(20));
        EXPECT_TRUE(began);
    }
    own.destroy(semaphore);
}

TEST(EngineInterop, ALaneJobDoesNotWaitForTheCallersTimelineForEver) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    {
        const auto device = Device::adopt(own.external(), test_options());
        HostThread thread(*device, "host");
        Lane lane = thread.add_lane("lane");
        // Its own step takes longer than the limit of the next one, which does not count that.
        const TimePoint before =
            lane.post({.name = "before",
                       .waits = {},
                       .accesses = {},
                       .step =
                           [&](LaneContext&) {
                               std::this_thread::sleep_for(std::chrono::milliseconds(300));
                               return Progress::Done;
                           },
                       .timeout = std::chrono::seconds(20)});
        const auto posted = std::chrono::steady_clock::now();
        const TimePoint never = lane.post({.name = "job",
                                           .waits = {before, wrap_timeline(*device, semaphore, 3)},
                                           .accesses = {},
                                           .step = [](LaneContext&) { return Progress::Done; },
                                           .timeout = std::chrono::milliseconds(200)});
        try {
            never.wait(std::chrono::seconds(20));
            ADD_FAILURE() << "it began before the caller's timeline was reached";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::Timeout);
            EXPECT_NE(error.message().find("job on lane has not begun: it waited more than 200 ms "
                                           "for a timeline of the caller to reach 3"),
                      std::string::npos)
                << error.message();
        }
        EXPECT_GE(std::chrono::steady_clock::now() - posted, std::chrono::milliseconds(450));
        EXPECT_TRUE(before.reached());
    }
    own.destroy(semaphore);
}

TEST(EngineInterop, ALaneJobDoesNotWaitForWhatItHasSubmittedForEver) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    DeviceOptions options = test_options();
    options.sync = SyncMode::Overlap; // the device waits for the caller, not this process
    {
        const auto device = Device::adopt(own.external(), options);
        HostThread thread(*device, "host");
        Lane lane = thread.add_lane("lane");
        const Buffer buffer(*device, {.name = "values", .bytes = 64});
        Recording fill(*device, QueueRole::Compute, "fill");
        fill.fill(buffer.view(), 5);
        const TimePoint never = wrap_timeline(*device, semaphore, 1);
        const TimePoint done = lane.post({.name = "job",
                                          .waits = {},
                                          .accesses = {{buffer.view(), Access::Write}},
                                          .step =
                                              [&](LaneContext& context) {
                                                  context.submit(fill, std::array{never});
                                                  return Progress::Done;
                                              },
                                          .timeout = std::chrono::milliseconds(200)});
        try {
            done.wait(std::chrono::seconds(20));
            ADD_FAILURE() << "it ended before what it had submitted";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::Timeout);
            EXPECT_NE(error.message().find("job on lane took more than 200 ms"), std::string::npos)
                << error.message();
        }
        own.signal(semaphore, 1);
    }
    own.destroy(semaphore);
}

TEST(EngineInterop, TheCallersWorkDoesNotHoldUpTheEndOfADevice) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    auto device = Device::adopt(own.external(), test_options());
    {
        const Buffer buffer(*device, {.name = "values", .bytes = 64});
        Recording fill(*device, QueueRole::Compute, "fill");
        fill.fill(buffer.view(), 5);
        device->submit(fill).wait();
    }
    VkSemaphoreSubmitInfo wait{};
    wait.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SUBMIT_INFO;
    wait.semaphore = semaphore;
    wait.value = 1;
    wait.stageMask = VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT;
    VkSubmitInfo2 submit{};
    submit.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2;
    submit.waitSemaphoreInfoCount = 1;
    submit.pWaitSemaphoreInfos = &wait;
    ASSERT_EQ(own.call<PFN_vkQueueSubmit2>("vkQueueSubmit2")(own.queue, 1, &submit, VK_NULL_HANDLE),
              VK_SUCCESS);
    // Should it wait for that, it is let go: the test fails, and does not hang.
    std::atomic<bool> gone{false}, let_go{false};
    const std::jthread watch([&] {
        for (int i = 0; i < 1000 && !gone; ++i)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        let_go = !gone;
        own.signal(semaphore, 1);
    });
    device.reset();
    gone = true;
    EXPECT_FALSE(let_go);
}

TEST(EngineInterop, MemoryIsKeptForWorkThatRunsOnBehindAFailure) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    DeviceOptions options = test_options();
    options.sync = SyncMode::Overlap;
    {
        const auto device = Device::adopt(own.external(), options);
        HostThread thread(*device, "host");
        Lane lane = thread.add_lane("lane");
        std::optional<Buffer> used(std::in_place, *device, BufferDesc{.name = "used", .bytes = 64});
        const Buffer copied(*device, {.name = "copied", .bytes = 64});
        const Buffer late(*device, {.name = "late", .bytes = 64});
        // The device waits for the caller with the first; the second is held back by a job that
        // does not end, comes after the first, and fails before it.
        Recording reads(*device, QueueRole::Compute, "reads"),
            writes(*device, QueueRole::Compute, "writes");
        reads.copy(used->view(), copied.view());
        writes.copy(late.view(), used->view());
        const TimePoint read =
            device->submit(reads, std::array{wrap_timeline(*device, semaphore, 1)});
        lane.post({.name = "job",
                   .waits = {},
                   .accesses = {{late.view(), Access::Write}},
                   .step = [](LaneContext&) { return Progress::Again; }});
        const TimePoint failed = device->submit(writes);
        device->abort(Error(ErrorCode::Aborted, "the test gives up"));
        EXPECT_THROW(failed.wait(std::chrono::seconds(20)), Error);
        used.reset();
        EXPECT_EQ(device->memory_report().bytes, 192u) << "it is still read";
        own.signal(semaphore, 1);
        for (int i = 0; i < 20'000 && device->memory_report().bytes > 128; ++i) {
            static_cast<void>(read.state());
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        EXPECT_EQ(device->memory_report().bytes, 128u);
    }
    own.destroy(semaphore);
}

TEST(EngineInterop, ALostDeviceNamesWhatHadEndedAndWhatHadNot) {
    OwnVulkan own;
    const VkSemaphore semaphore = own.timeline();
    DeviceOptions options = test_options();
    options.sync = SyncMode::Overlap; // the order of submissions counts here
    options.faults.lose_device = 3;
    {
        const auto device = Device::adopt(own.external(), options);
        const Buffer a(*device, {.name = "a", .bytes = 64}), b(*device, {.name = "b", .bytes = 64});
        Recording first(*device, QueueRole::Compute, "ATTN(F) of layer 1");
        first.fill(a.view(), 1);
        Recording second(*device, QueueRole::Compute, "MLP(F) of layer 1");
        second.fill(a.view(), 2);
        second.copy(a.view(), b.view());
        Recording third(*device, QueueRole::Compute, "ATTN(F) of layer 2");
        third.fill(b.view(), 3);
        Recording fourth(*device, QueueRole::Compute, "MLP(F) of layer 2");
        fourth.fill(a.view(), 4);
        device->submit(first).wait();
        // What waits for the caller's timeline is surely in flight when the device is lost.
        const TimePoint pending =
            device->submit(second, std::array{wrap_timeline(*device, semaphore, 1)});
        const TimePoint behind = device->submit(third);
        std::string message;
        try {
            device->submit(fourth);
            ADD_FAILURE() << "the device was not lost";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::DeviceLost);
            EXPECT_EQ(error.detail(), VK_ERROR_DEVICE_LOST);
            message = error.message();
        }
        for (const char* part :
             {"submitting MLP(F) of layer 2", "last batch to end was ATTN(F) of layer 1",
              "in flight: MLP(F) of layer 1 (value 2: fill, copy), ATTN(F) of layer 2 (value 3)"})
            EXPECT_NE(message.find(part), std::string::npos) << message;
        for (const TimePoint& point : {pending, behind}) {
            EXPECT_EQ(point.state(), TimePoint::State::Failed);
            EXPECT_THROW(point.wait(), Error);
        }
        EXPECT_THROW(device->submit(first), Error);
        // The device is not really gone: let it end before its objects are destroyed.
        own.signal(semaphore, 1);
        own.call<PFN_vkDeviceWaitIdle>("vkDeviceWaitIdle")(own.device);
    }
    own.destroy(semaphore);
}

} // namespace
} // namespace bellows
