// SPDX-License-Identifier: MIT
#include "runtime/device_impl.hpp"
#include "runtime/physical_device.hpp"

#include <bellows/engine/vulkan_interop.hpp>

#include <utility>

namespace bellows {

using detail::Ticket;

struct RequiredFeatures::Impl {
    detail::PhysicalDevice physical;
};

RequiredFeatures::RequiredFeatures(VkInstance instance, VkPhysicalDevice physical_device,
                                   PFN_vkGetInstanceProcAddr get_instance_proc)
    : impl_(std::make_unique<Impl>()) {
    volk::VolkInstanceTable vki{};
    detail::load_instance_functions(
        vki, instance, get_instance_proc != nullptr ? get_instance_proc : detail::system_loader());
    impl_->physical = detail::inspect(vki, physical_device, 0);
}

RequiredFeatures::~RequiredFeatures() = default;

const VkPhysicalDeviceFeatures2* RequiredFeatures::features() const noexcept {
    return &impl_->physical.enable->features;
}

std::span<const char* const> RequiredFeatures::extensions() const noexcept {
    return impl_->physical.extensions;
}

const std::vector<std::string>& RequiredFeatures::unmet() const noexcept {
    return impl_->physical.info.unmet_requirements;
}

TimePoint wrap_timeline(Device& device, VkSemaphore semaphore, std::uint64_t value) {
    Device::Impl& impl = device.impl();
    const std::scoped_lock lock(impl.mutex);
    auto ticket = impl.new_ticket("a timeline of the caller");
    auto& timeline = impl.external_timelines[semaphore];
    timeline.semaphore = semaphore;
    timeline.external = true;
    ticket->timeline = &timeline;
    ticket->value = value;
    ticket->state.store(Ticket::State::Submitted);
    return TimePoint(std::move(ticket));
}

VulkanTimePoint vulkan_time_point(const TimePoint& point) {
    const auto& ticket = point.ticket();
    if (ticket == nullptr || ticket->timeline == nullptr ||
        (ticket->state.load() == Ticket::State::Held && !ticket->lane))
        throw Error(ErrorCode::InvalidArgument,
                    "the time point has no semaphore yet: the pump holds it");
    if (!ticket->lane && ticket->device != nullptr && ticket->device->impl().pump->is_gathering())
        point.state(); // it is to come
    if (ticket->state.load() == Ticket::State::Failed)
        throw Error(*ticket->error);
    if (ticket->lane && ticket->device != nullptr) {
        Device::Impl& impl = ticket->device->impl();
        const std::scoped_lock lock(impl.mutex);
        if (!std::exchange(ticket->timeline->shown, true) && ticket->timeline->ended > 0)
            impl.signal(*ticket->timeline, ticket->name);
    }
    return {ticket->timeline->semaphore, ticket->value};
}

} // namespace bellows
