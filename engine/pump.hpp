// SPDX-License-Identifier: MIT
#pragma once

// The submit pump. It holds every batch until each of its waits is reached or, where a VkQueue
// signals it, submitted; so a queue never waits for something that comes later on it. Whoever
// changes the state of a ticket calls advance(). All members need Device::Impl::mutex.

#include "ticket.hpp"

#include <bellows/engine/device.hpp>

#include <deque>
#include <random>
#include <span>
#include <vector>

namespace bellows::detail {

struct Batch {
    Recording::Impl* recording = nullptr;
    TicketPtr ticket;
    std::vector<TicketPtr> waits;
    std::uint32_t queue = 0;
    bool inside_lane_job = false;
    VectorClock base_clock;        ///< what the submitting lane job knew
    std::int64_t submitted_ns = 0; ///< host clock, when handed to the queue
};

class Pump {
public:
    explicit Pump(Device::Impl& device);

    /// Derives the waits from the recording's accesses and registers them, or takes only `waits`
    /// for work inside a lane job.
    TicketPtr submit(Recording::Impl& recording, std::vector<TicketPtr> waits,
                     const VectorClock* lane_clock);
    /// Takes part in the order of work without being a batch: derives waits for a lane job.
    void order_lane_job(const TicketPtr& ticket, std::vector<TicketPtr>& waits,
                        std::span<const std::pair<BufferView, Access>> accesses);
    /// Submits what has become ready. In shuffle mode ready batches gather until somebody waits:
    /// `flush` submits all of them in a random order.
    void advance(bool flush = false);
    /// Marks finished submissions as reached.
    void collect();
    /// An external timeline is in nobody's books: asks it whether `ticket` has been reached.
    void poll_external(const TicketPtr& ticket);
    /// Fails every batch that is held.
    void fail_held(const Error& error);
    bool idle() const noexcept { return held_.empty() && ready_.empty() && in_flight_.empty(); }
    std::string describe_pending() const;
    void finish(const TicketPtr& ticket, Ticket::State state, const Error* error);
    /// The device is gone, as `result` of `what` says: fails everything that is in flight or held
    /// with an Error that says, for each queue, what had ended and what had not. Returns it.
    Error lose_device(VkResult result, const std::string& what);

private:
    bool is_ready(const Batch& batch) const;
    const Error* failed_wait(const Batch& batch) const;
    void submit_now(Batch& batch);
    std::string breadcrumbs() const;
    void add_serial_wait(const TicketPtr& ticket, std::vector<TicketPtr>& waits);
    void add_derived_waits(std::vector<TicketPtr> derived, std::vector<TicketPtr>& waits);

    Device::Impl& device_;
    std::deque<Batch> held_;
    std::vector<Batch> ready_; ///< shuffle mode only
    std::deque<Batch> in_flight_;
    TicketPtr last_; ///< newest in the order of work, for serial mode
    std::mt19937_64 random_;
};

} // namespace bellows::detail
