// SPDX-License-Identifier: MIT
// Gathering: how many recordings the driver has been given, and when.

#include "support/own_vulkan.hpp"

#include "engine/runtime/device_impl.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::OwnVulkan;
using testing::read_back;
using testing::test_options;

/// A device whose queue is at work until its timeline is signalled.
class BusyDevice {
public:
    explicit BusyDevice(DeviceOptions options = test_options()) {
        options.sync = SyncMode::Overlap; // the order of submissions counts here
        device_ = Device::adopt(own_.external(), options);
        words_ = Buffer(*device_, {.name = "words", .bytes = kMost * 4});
        busy_ = std::make_unique<Recording>(*device_, QueueRole::Compute, "busy");
        busy_->fill(words_.view(), 0);
        device_->submit(*busy_, std::array{wrap_timeline(*device_, semaphore_, 1)});
    }
    ~BusyDevice() {
        recordings_.clear();
        busy_.reset();
        words_ = Buffer();
        device_.reset();
        own_.destroy(semaphore_);
    }

    void end_what_it_is_at() { own_.signal(semaphore_, 1); }
    /// Fills the next word with its number.
    TimePoint submit_next() {
        const auto word = static_cast<std::uint32_t>(recordings_.size());
        recordings_.push_back(std::make_unique<Recording>(*device_, QueueRole::Compute,
                                                          "fill " + std::to_string(word)));
        recordings_.back()->fill(words_.view().sub(4 * word, 4), word);
        return device_->submit(*recordings_.back());
    }
    /// Recordings that the driver has been given.
    std::int64_t num_submissions() const { return device_->impl().num_submissions; }
    Device& device() { return *device_; }
    OwnVulkan& own() { return own_; }
    std::vector<std::uint32_t> words() { return read_back<std::uint32_t>(*device_, words_.view()); }

    static constexpr std::uint32_t kMost = 40;

private:
    OwnVulkan own_;
    VkSemaphore semaphore_ = own_.timeline();
    std::unique_ptr<Device> device_;
    Buffer words_;
    std::unique_ptr<Recording> busy_;
    std::vector<std::unique_ptr<Recording>> recordings_;
};

TEST(EngineGathering, WhatIsGatheredGoesToABusyQueueTogether) {
    BusyDevice busy;
    {
        const Gathering together(busy.device());
        const Gathering within(busy.device());
        const TimePoint first = busy.submit_next();
        const TimePoint second = busy.submit_next();
        EXPECT_EQ(busy.num_submissions(), 1);
        EXPECT_EQ(second.state(), TimePoint::State::Pending); // who asks wants it to come
        EXPECT_EQ(busy.num_submissions(), 3);
        busy.submit_next();
        EXPECT_EQ(busy.num_submissions(), 3);
        vulkan_time_point(first); // as who waits elsewhere does
        EXPECT_EQ(busy.num_submissions(), 4);
        std::int64_t together_at_most = 0;
        for (std::uint32_t i = 3; i < BusyDevice::kMost; ++i) {
            busy.submit_next();
            together_at_most = std::max(together_at_most, i + 2 - busy.num_submissions());
        }
        EXPECT_GT(together_at_most, 1);
        EXPECT_LT(together_at_most, 32);
    }
    EXPECT_EQ(busy.num_submissions(), BusyDevice::kMost + 1);
    busy.end_what_it_is_at();
    std::vector<std::uint32_t> expected(BusyDevice::kMost);
    std::iota(expected.begin(), expected.end(), 0u);
    EXPECT_EQ(busy.words(), expected);
}

TEST(EngineGathering, AWaitWithinItEnds) {
    BusyDevice busy;
    const Gathering together(busy.device());
    const TimePoint first = busy.submit_next();
    busy.end_what_it_is_at();
    first.wait();
    const TimePoint second = busy.submit_next(); // the queue has nothing to do
    second.wait();
    EXPECT_EQ(busy.num_submissions(), 3);
}

TEST(EngineGathering, GatheredWorkIsLostTogether) {
    DeviceOptions options = test_options();
    options.faults.lose_device = 2;
    BusyDevice busy(options);
    std::vector<TimePoint> points;
    {
        const Gathering together(busy.device());
        for (int i = 0; i < 3; ++i)
            points.push_back(busy.submit_next());
        EXPECT_EQ(busy.num_submissions(), 1);
    }
    for (const TimePoint& point : points) {
        try {
            point.wait();
            ADD_FAILURE() << "the device was not lost";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::DeviceLost);
            EXPECT_NE(error.message().find("submitting fill 0"), std::string::npos)
                << error.message();
        }
    }
    EXPECT_THROW(vulkan_time_point(points.front()), Error); // nobody will signal it
    EXPECT_THROW(busy.submit_next(), Error);
    // It is not really gone: let it end before its objects are destroyed.
    busy.end_what_it_is_at();
    busy.own().call<PFN_vkDeviceWaitIdle>("vkDeviceWaitIdle")(busy.own().device);
}

} // namespace
} // namespace bellows
