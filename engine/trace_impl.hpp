// SPDX-License-Identifier: MIT
#pragma once

// Collects trace events. Device timestamps are placed on the host clock by an offset estimated from
// finished work. Needs Device::Impl::mutex.

#include "vulkan.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/trace.hpp>

#include <vector>

namespace bellows::detail {

class Trace {
public:
    explicit Trace(Device::Impl& device);

    /// Two timestamps per operation; null where the queue has no timestamps.
    VkQueryPool create_queries(std::uint32_t queue, std::uint32_t num_operations) const;
    /// Reads the timestamps of a finished run.
    void read_queries(const Recording::Impl& recording, std::uint32_t queue);
    void add(TraceEvent event);
    std::vector<TraceEvent> take();
    static std::int64_t now_ns();

private:
    void calibrate(std::int64_t newest_device_ns);
    std::string queue_lane(std::uint32_t queue) const;

    Device::Impl& device_;
    std::vector<TraceEvent> events_;
    std::vector<bool> device_event_; ///< its times are still the device's
    std::int64_t offset_ns_ = 0;     ///< host time = device time + offset
    bool calibrated_ = false;
};

} // namespace bellows::detail
