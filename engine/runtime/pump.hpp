// SPDX-License-Identifier: MIT
#pragma once

// The submit pump. It holds every batch until each of its waits is reached or, where a VkQueue
// signals it, submitted; so a queue never waits for something that comes later on it. Batches that
// become ready together are given to their queue in one call. Whoever changes the state of a ticket
// calls advance(). All members need Device::Impl::mutex.

#include "ticket.hpp"

#include <bellows/engine/device.hpp>

#include <atomic>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <span>
#include <vector>

namespace bellows::detail {

struct Batch {
    Recording::Impl* recording = nullptr;
    TicketPtr ticket;
    std::vector<TicketPtr> waits;
    std::size_t num_open_waits = 0; ///< that hold it back, while it is held
    std::uint32_t queue = 0;
    bool inside_lane_job = false;
    VectorClock base_clock;                        ///< what the submitting lane job knew
    std::int64_t submitted_ns = 0;                 ///< host clock, when handed to the queue
    std::vector<VkSemaphoreSubmitInfo> semaphores; ///< of other queues, that it waits for
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
    enum class Flush : std::uint8_t {
        Nothing,
        Ready,    ///< in shuffle mode, where ready batches wait for somebody who wants one of them:
                  ///< all of them, in a random order
        Gathered, ///< and those that gather
    };
    /// Submits what has become ready.
    void advance(Flush flush = Flush::Nothing);
    /// Until end_gathering(), what is ready outside lane jobs gathers while its queue has something
    /// to do.
    void begin_gathering() noexcept { ++num_gathering_; }
    void end_gathering();
    /// Without the mutex.
    bool is_gathering() const noexcept { return num_gathering_ > 0; }
    /// Marks finished submissions as reached.
    void collect();
    /// An external timeline is in nobody's books: asks it whether `ticket` has been reached.
    void poll_external(const TicketPtr& ticket);
    /// Fails every batch that is held.
    void fail_held(const Error& error);
    bool idle() const noexcept;
    std::string describe_pending() const;
    void finish(const TicketPtr& ticket, Ticket::State state, const Error* error);
    /// The device is gone, as `result` of `what` says: fails everything that is in flight or held
    /// with an Error that says, for each queue, what had ended and what had not. Returns it.
    Error lose_device(VkResult result, const std::string& what);

private:
    static bool holds_back(const Ticket& wait) noexcept;
    static const Error* failed_wait(const Batch& batch);
    void hold(Batch batch);
    void passed(Ticket& ticket);
    void release(Batch batch);
    void release_all(bool flush);
    void submit_one_at_random();
    void give_to_queue(Batch batch);
    bool take_semaphores(Batch& batch);
    bool gathers(std::uint32_t queue) const noexcept;
    void submit_given(std::uint32_t queue);
    void let_end(std::uint32_t queue);
    void fail_given(const Error& error);
    std::string breadcrumbs() const;
    void add_serial_wait(const TicketPtr& ticket, std::vector<TicketPtr>& waits);
    void add_derived_waits(std::vector<TicketPtr> derived, std::vector<TicketPtr>& waits);

    Device::Impl& device_;
    // By their place in the order of submit() calls, in which those that can go are submitted.
    std::map<std::uint64_t, Batch> held_;
    std::set<std::uint64_t> released_; ///< of the held ones, those that nothing holds back
    std::uint64_t num_submits_ = 0;
    std::vector<Batch> ready_;                 ///< shuffle mode only
    std::vector<std::vector<Batch>> given_;    ///< by queue: what its next call submits
    std::vector<std::deque<Batch>> in_flight_; ///< by queue
    std::atomic<int> num_gathering_{0};
    bool any_finished_ = false; ///< since the last collect()
    TicketPtr last_;            ///< newest in the order of work, for serial mode
    std::mt19937_64 random_;
};

} // namespace bellows::detail
