// SPDX-License-Identifier: MIT
#pragma once

// Collects trace events. Device timestamps are placed on the host's steady clock: by the driver's
// calibrated timestamps where it has them, else by bracketing batches (clock_map.hpp). A queue
// without timestamps shows its batches as the host saw them, from hand-in to end. Needs
// Device::Impl::mutex.

#include "clock_map.hpp"
#include "ticket.hpp"
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
    /// A run has been handed to its queue at submitted_ns (host) and is seen to be finished: reads
    /// its timestamps.
    void batch_done(const Recording::Impl& recording, const Ticket& ticket, std::uint32_t queue,
                    std::int64_t submitted_ns);
    void add(TraceEvent event);
    /// An event that others of its lane may overlap: take() finds lanes for them.
    void add_beside(TraceEvent event);
    std::vector<TraceEvent> take();
    /// The host's steady clock, which is CLOCK_MONOTONIC.
    static std::int64_t now_ns();
    /// True when the driver reads both clocks; else offsets are estimates.
    bool calibrated() const noexcept { return read_clocks_ != nullptr; }

private:
    void calibrate(std::int64_t now);
    std::int64_t to_ns(std::uint64_t ticks) const;
    bool read_queries(const Recording::Impl& recording, const Ticket& ticket, std::uint32_t queue,
                      std::int64_t submitted_ns);
    std::string queue_lane(std::uint32_t queue) const;
    /// Moves events from device to host time.
    void place_events();
    /// Moves each event of beside_ to the first of its lanes that is free.
    void spread_over_lanes();

    Device::Impl& device_;
    PFN_vkGetCalibratedTimestampsKHR read_clocks_ = nullptr;
    ClockMap clock_;
    std::int64_t calibrated_at_ns_ = 0;
    std::vector<TraceEvent> events_, beside_;
    std::vector<std::size_t> in_device_time_; ///< indices of events not yet placed
};

} // namespace bellows::detail
