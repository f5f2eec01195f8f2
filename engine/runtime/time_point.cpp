// SPDX-License-Identifier: MIT
#include <bellows/engine/time_point.hpp>

#include "device_impl.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace bellows {

using detail::Ticket;
using Clock = std::chrono::steady_clock;

namespace {

/// Looks for what is about to come without sleeping: waking up takes some 50 us, as long as a small
/// exchange. Not where kernels need the core.
void look_for_a_while(const Ticket& ticket, const Device::Impl& device) {
    constexpr auto kLongest = std::chrono::microseconds(300);
    if (device.info.is_cpu || ticket.lane)
        return;
    const auto end = Clock::now() + kLongest;
    do {
        const Ticket::State state = ticket.state.load(std::memory_order_acquire);
        std::uint64_t value = 0;
        if (ticket.final_state())
            return;
        if (state == Ticket::State::Submitted &&
            (device.vk.vkGetSemaphoreCounterValue(device.device, ticket.timeline->semaphore,
                                                  &value) != VK_SUCCESS ||
             value >= ticket.value))
            return; // what went wrong is said by the wait
        std::this_thread::yield();
    } while (Clock::now() < end);
}

} // namespace

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
            device.pump->advance(detail::Pump::Flush::Gathered);
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
    if (!reached()) // from now on nothing is gathered that it waits for
        look_for_a_while(*ticket_, ticket_->device->impl());
    while (!reached()) {
        Device::Impl& device = ticket_->device->impl();
        const auto left = deadline - Clock::now();
        std::unique_lock lock(device.mutex);
        if (left <= Clock::duration::zero())
            throw Error(ErrorCode::Timeout, "waited " + std::to_string(timeout.count()) +
                                                " ms for " + ticket_->name + "; " +
                                                device.pump->describe_pending());
        if (ticket_->lane) // a step of its job may stand in a driver
            device.throw_if_failed();
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
