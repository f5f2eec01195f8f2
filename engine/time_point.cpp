// SPDX-License-Identifier: MIT
#include <bellows/engine/time_point.hpp>

#include "device_impl.hpp"

#include <algorithm>
#include <utility>

namespace bellows {

using detail::Ticket;
using Clock = std::chrono::steady_clock;

TimePoint::TimePoint(std::shared_ptr<Ticket> ticket) noexcept : ticket_(std::move(ticket)) {
}

TimePoint::State TimePoint::state() const {
    if (ticket_ == nullptr)
        return State::Reached;
    if (!ticket_->final_state() && ticket_->device != nullptr) {
        Device::Impl& device = ticket_->device->impl();
        const std::scoped_lock lock(device.mutex);
        if (ticket_->is_external())
            device.pump->poll_external(ticket_);
        else
            device.pump->advance(true);
    }
    switch (ticket_->state.load(std::memory_order_acquire)) {
    case Ticket::State::Reached:
        return State::Reached;
    case Ticket::State::Failed:
        return State::Failed;
    default:
        return State::Pending;
    }
}

bool TimePoint::reached() const {
    const State now = state();
    if (now == State::Failed)
        throw Error(*ticket_->error);
    return now == State::Reached;
}

void TimePoint::wait(std::chrono::milliseconds timeout) const {
    const auto deadline = Clock::now() + timeout;
    while (!reached()) {
        Device::Impl& device = ticket_->device->impl();
        const auto left = deadline - Clock::now();
        std::unique_lock lock(device.mutex);
        if (left <= Clock::duration::zero())
            throw Error(ErrorCode::Timeout, "waited " + std::to_string(timeout.count()) +
                                                " ms for " + ticket_->name + "; " +
                                                device.pump->describe_pending());
        const auto slice = std::min<Clock::duration>(left, std::chrono::milliseconds(20));
        if (ticket_->state.load() == Ticket::State::Submitted && !ticket_->lane) {
            const VkSemaphore semaphore = ticket_->timeline->semaphore;
            const std::uint64_t value = ticket_->value;
            lock.unlock();
            VkSemaphoreWaitInfo info{};
            info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
            info.semaphoreCount = 1;
            info.pSemaphores = &semaphore;
            info.pValues = &value;
            const VkResult result = device.vk.vkWaitSemaphores(
                device.device, &info,
                static_cast<std::uint64_t>(
                    std::chrono::duration_cast<std::chrono::nanoseconds>(slice).count()));
            if (result == VK_ERROR_DEVICE_LOST) {
                lock.lock();
                throw device.pump->lose_device(result, "waiting for " + ticket_->name);
            }
            if (result != VK_TIMEOUT)
                detail::check(result, "waiting for " + ticket_->name);
        } else if (ticket_->state.load() == Ticket::State::Held) {
            device.changed.wait_for(lock, slice);
        }
    }
}

} // namespace bellows
