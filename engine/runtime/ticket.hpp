// SPDX-License-Identifier: MIT
#pragma once

// The shared state behind TimePoint, and the timelines that tickets refer to. All fields that
// change are guarded by Device::Impl::mutex, except `state`, which may be read at any time.

#include "vulkan.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace bellows {
class Device;
}

namespace bellows::detail {

/// How much of each actor's work (VkQueues first, lanes after) is known to have happened.
using VectorClock = std::vector<std::uint64_t>;

/// One timeline semaphore. Its values rise in the order of submissions (queues) or job ends
/// (lanes).
struct Timeline {
    VkSemaphore semaphore = VK_NULL_HANDLE;
    std::uint64_t last_value = 0; ///< of the newest submission or job
    bool external = false;        ///< the caller's; neither destroyed nor signalled by us
    /// Of a lane: the last job that has ended. The semaphore says so once it was shown to somebody:
    /// a driver takes some 15 us to signal one.
    std::uint64_t ended = 0;
    bool shown = false;
};

struct Ticket {
    enum class State : std::uint8_t {
        Held,      ///< in the pump, or a lane job that has not ended
        Submitted, ///< the device will signal timeline >= value
        Reached,
        Failed,
    };

    std::atomic<State> state{State::Held};
    std::string name;
    std::string op, by;      ///< for the trace, as in TraceEvent
    bool lane = false;       ///< signalled by a host lane
    std::uint32_t actor = 0; ///< VkQueue or lane, for the happens-before checker
    Timeline* timeline = nullptr;
    std::uint64_t value = 0;
    std::optional<Error> error; ///< set before state becomes Failed
    Device* device = nullptr;   ///< null once the device is gone; then state is final
    VectorClock clock;          ///< what has happened when this is reached
    /// Work that a lane job submitted: those who wait for the job need its writes too.
    std::vector<std::shared_ptr<Ticket>> inner;
    std::vector<std::uint64_t> held_batches; ///< that wait for it in the pump, by their places

    bool is_external() const noexcept { return timeline != nullptr && timeline->external; }
    bool final_state() const noexcept {
        const State now = state.load(std::memory_order_acquire);
        return now == State::Reached || now == State::Failed;
    }
    /// Nothing of it uses memory any more: what a failed lane job had submitted runs on.
    bool settled() const noexcept {
        return final_state() && std::all_of(inner.begin(), inner.end(), [](const auto& ticket) {
                   return ticket->final_state();
               });
    }
};

using TicketPtr = std::shared_ptr<Ticket>;

} // namespace bellows::detail
