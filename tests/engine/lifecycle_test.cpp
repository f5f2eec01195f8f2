// SPDX-License-Identifier: MIT
// What a Device takes it gives back: many of them one after another leave the process as it was.

#include "support/test_device.hpp"

#include <bellows/engine/lane.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

namespace bellows {
namespace {

using testing::test_options;

std::int64_t entries(const char* folder) {
    return std::distance(std::filesystem::directory_iterator(folder),
                         std::filesystem::directory_iterator());
}

/// The fewest threads seen within a fifth of a second: one that was joined may stay listed until
/// the kernel has put it away.
std::int64_t settled_threads() {
    std::int64_t fewest = entries("/proc/self/task");
    for (int i = 0; i < 20; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        fewest = std::min(fewest, entries("/proc/self/task"));
    }
    return fewest;
}

/// Mapped libraries and memory of this process.
struct Footprint {
    std::int64_t files = 0, threads = 0, libraries = 0, maps = 0;
};

Footprint footprint() {
    Footprint now{.files = entries("/proc/self/fd"), .threads = settled_threads()};
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line); ++now.maps)
        if (line.find(".so") != std::string::npos)
            ++now.libraries;
    return now;
}

void use_a_device(const DeviceOptions& options) {
    const auto device = Device::create(options);
    HostThread thread(*device, "host");
    const Lane lane = thread.add_lane("lane");
    const Buffer buffer(*device, {.name = "values", .bytes = 4096});
    Recording recording(*device, QueueRole::Compute, "fill");
    recording.fill(buffer.view(), 5);
    device->submit(recording).wait();
}

TEST(EngineLifecycle, TwoHundredDevicesOneAfterAnotherLeaveNothingBehind) {
    DeviceOptions options = test_options();
    options.trace = true;
    for (int i = 0; i < 5; ++i) // what drivers make once
        use_a_device(options);
    const Footprint before = footprint();
    for (int i = 0; i < 200; ++i)
        use_a_device(options);
    const Footprint after = footprint();
    EXPECT_EQ(after.files, before.files);
    EXPECT_EQ(after.threads, before.threads);
    EXPECT_EQ(after.libraries, before.libraries);
    // The heap may grow (a sanitizer's does so by itself); one mapping per device would be 200.
    EXPECT_LE(after.maps, before.maps + 100);
}

TEST(EngineLifecycle, DriversStayLoadedBetweenDevices) {
    // Some drivers can be loaded only a few dozen times in a process.
    DeviceOptions options = test_options();
    options.validation = false; // its layer comes and goes with each device
    auto device = Device::create(options);
    const std::int64_t libraries = footprint().libraries;
    device.reset();
    EXPECT_EQ(footprint().libraries, libraries);
}

TEST(EngineLifecycle, ListingDevicesLeavesNothingBehind) {
    const auto first = list_devices();
    const Footprint before = footprint();
    for (int i = 0; i < 50; ++i)
        ASSERT_EQ(list_devices().size(), first.size());
    const Footprint after = footprint();
    EXPECT_EQ(after.files, before.files);
    EXPECT_EQ(after.threads, before.threads);
    EXPECT_EQ(after.libraries, before.libraries);
}

TEST(EngineLifecycle, DevicesLiveSideBySide) {
    std::vector<std::unique_ptr<Device>> devices;
    std::vector<Buffer> buffers;
    for (std::uint32_t i = 0; i < 6; ++i) {
        devices.push_back(Device::create(test_options()));
        buffers.emplace_back(*devices.back(), BufferDesc{.name = "values", .bytes = 64});
    }
    for (std::uint32_t i = 0; i < 6; ++i) {
        Recording recording(*devices[i], QueueRole::Compute, "fill");
        recording.fill(buffers[i].view(), 100 + i);
        devices[i]->submit(recording).wait();
    }
    for (std::uint32_t i = 0; i < 6; ++i)
        EXPECT_EQ(testing::read_back<std::uint32_t>(*devices[i], buffers[i].view())[15], 100 + i);
    buffers.clear();
}

} // namespace
} // namespace bellows
