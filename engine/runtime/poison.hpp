// SPDX-License-Identifier: MIT
#pragma once

// Fills memory that nobody uses with words that are NaN as f32 and bf16 and a huge count, by
// commands on the compute queue: what is device-local need not be visible to the host. The pump
// makes whoever uses the memory next wait for the ticket. All members need Device::Impl::mutex.

#include "ticket.hpp"
#include "vulkan.hpp"

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <deque>
#include <vector>

namespace bellows::detail {

class Poisoner {
public:
    static constexpr std::uint32_t kWord = 0xffff'ffff;

    explicit Poisoner(Device::Impl& device);
    /// Waits for what is under way, for a bounded time.
    ~Poisoner();
    Poisoner(const Poisoner&) = delete;
    Poisoner& operator=(const Poisoner&) = delete;

    /// Fills `buffer`, whose earlier users have ended. Null when the device has failed.
    TicketPtr fill(VkBuffer buffer);
    /// Marks what has ended.
    void collect();

private:
    struct Fill {
        VkCommandBuffer commands = VK_NULL_HANDLE;
        TicketPtr ticket;
    };
    VkCommandBuffer new_commands();
    void record(VkCommandBuffer commands, VkBuffer buffer) const;

    Device::Impl& device_;
    Timeline timeline_; ///< of its own: those of the queues count batches
    VkCommandPool pool_ = VK_NULL_HANDLE;
    std::vector<VkCommandBuffer> free_;
    std::deque<Fill> running_;
};

} // namespace bellows::detail
