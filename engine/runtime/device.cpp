// SPDX-License-Identifier: MIT
#include "device_impl.hpp"
#include "physical_device.hpp"
#include "queue_plan.hpp"
#include "recording_impl.hpp"

#include <bellows/engine/vulkan_interop.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

namespace bellows {

using detail::check;
using detail::QueuePlan;
using detail::Ticket;
using detail::TicketPtr;
using Clock = std::chrono::steady_clock;

Device::Impl::Impl(Device& owner) : self(owner) {
}

VkSemaphore Device::Impl::create_timeline() const {
    VkSemaphoreTypeCreateInfo type{};
    type.sType = VK_STRUCTURE_TYPE_SEMAPHORE_TYPE_CREATE_INFO;
    type.semaphoreType = VK_SEMAPHORE_TYPE_TIMELINE;
    VkSemaphoreCreateInfo create{};
    create.sType = VK_STRUCTURE_TYPE_SEMAPHORE_CREATE_INFO;
    create.pNext = &type;
    VkSemaphore semaphore = VK_NULL_HANDLE;
    check(vk.vkCreateSemaphore(device, &create, nullptr, &semaphore), "creating a timeline");
    return semaphore;
}

void Device::Impl::signal(const detail::Timeline& lane, const std::string& name) {
    VkSemaphoreSignalInfo ended{};
    ended.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SIGNAL_INFO;
    ended.semaphore = lane.semaphore;
    ended.value = lane.ended;
    const VkResult result = vk.vkSignalSemaphore(device, &ended);
    if (result == VK_ERROR_DEVICE_LOST)
        throw pump->lose_device(result, "signalling " + name);
    check(result, "signalling " + name);
}

TicketPtr Device::Impl::new_ticket(std::string name) {
    auto ticket = std::make_shared<Ticket>();
    ticket->name = std::move(name);
    ticket->op = traced_op;
    ticket->device = &self;
    return ticket;
}

void Device::Impl::throw_if_failed() const {
    if (failure)
        throw Error(*failure);
    if (const std::string message = validation.first(); !message.empty())
        throw Error(ErrorCode::Internal, "validation: " + message);
}

void Device::Impl::set_failure(const Error& error) {
    if (!failure)
        failure = error;
    changed.notify_all();
}

namespace {

VKAPI_ATTR VkBool32 VKAPI_CALL
on_validation_message(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                      const VkDebugUtilsMessengerCallbackDataEXT* data, void* user) {
    // Called from inside Vulkan calls, with or without the device's mutex.
    static_cast<Device::Impl*>(user)->validation.add(data->pMessage);
    return VK_FALSE;
}

void create_messenger(Device::Impl& impl) {
    VkDebugUtilsMessengerCreateInfoEXT info{};
    info.sType = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT;
    info.messageSeverity = VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT |
                           VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT;
    info.messageType = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
    info.pfnUserCallback = on_validation_message;
    info.pUserData = &impl;
    check(impl.vki.vkCreateDebugUtilsMessengerEXT(impl.instance, &info, nullptr, &impl.messenger),
          "creating the validation messenger");
}

/// The feature of devices that have no queue of a family with graphics.
constexpr const char* kNoGraphicsQueue = "no_graphics_queue";

/// Distinct VkQueues of a plan, or one for each role, and which of them each role has.
std::vector<QueuePlan::Slot> queues_of(const QueuePlan& plan, bool each_role,
                                       std::array<std::uint32_t, kNumQueueRoles>& queue_of_role) {
    std::vector<QueuePlan::Slot> slots;
    for (std::size_t role = 0; role < plan.role.size(); ++role) {
        const auto found =
            each_role ? slots.end() : std::find(slots.begin(), slots.end(), plan.role[role]);
        queue_of_role[role] = static_cast<std::uint32_t>(found - slots.begin());
        if (found == slots.end())
            slots.push_back(plan.role[role]);
    }
    return slots;
}

void create_vulkan_device(Device::Impl& impl, detail::PhysicalDevice& physical) {
    const std::vector<std::string>& without = impl.options.leave_out;
    const bool graphics_queue =
        std::find(without.begin(), without.end(), kNoGraphicsQueue) != without.end();
    const QueuePlan plan = detail::plan_queues(physical.queue_families, graphics_queue);
    if (plan.no_graphics_queue(physical.queue_families))
        impl.info.features.push_back(kNoGraphicsQueue);
    const auto slots = queues_of(plan, impl.options.roles_apart, impl.queue_of_role);
    std::vector<std::vector<float>> priorities(physical.queue_families.size());
    for (const auto& slot : slots)
        priorities[slot.family].resize(
            std::max<std::size_t>(priorities[slot.family].size(), slot.index + 1), 1.0f);
    std::vector<VkDeviceQueueCreateInfo> queue_infos;
    for (std::uint32_t family = 0; family < priorities.size(); ++family) {
        if (priorities[family].empty())
            continue;
        VkDeviceQueueCreateInfo info{};
        info.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
        info.queueFamilyIndex = family;
        info.queueCount = static_cast<std::uint32_t>(priorities[family].size());
        info.pQueuePriorities = priorities[family].data();
        queue_infos.push_back(info);
    }
    VkDeviceCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    info.pNext = &physical.enable->features;
    info.queueCreateInfoCount = static_cast<std::uint32_t>(queue_infos.size());
    info.pQueueCreateInfos = queue_infos.data();
    info.enabledExtensionCount = static_cast<std::uint32_t>(physical.extensions.size());
    info.ppEnabledExtensionNames = physical.extensions.data();
    check(impl.vki.vkCreateDevice(physical.handle, &info, nullptr, &impl.device),
          "creating a device on " + physical.info.name);
    detail::load_device_functions(impl.vk, impl.device, impl.vki.vkGetDeviceProcAddr);
    for (const auto& slot : slots) {
        auto queue = std::make_unique<Device::Impl::Queue>();
        impl.vk.vkGetDeviceQueue(impl.device, slot.family, slot.index, &queue->handle);
        queue->family = slot.family;
        queue->timestamp_bits = physical.queue_families[slot.family].timestampValidBits;
        impl.queues.push_back(std::move(queue));
    }
}

/// Everything beyond the raw Vulkan handles.
void furnish(Device::Impl& impl) {
    for (auto& queue : impl.queues) {
        queue->timeline.semaphore = impl.create_timeline();
        if (std::find(impl.families.begin(), impl.families.end(), queue->family) ==
            impl.families.end())
            impl.families.push_back(queue->family);
    }
    if (impl.options.check_happens_before) {
        impl.checker = std::make_unique<HappensBefore>();
        for (std::uint32_t i = 0; i < impl.queues.size(); ++i)
            impl.checker->add_actor("queue " + std::to_string(i));
    }
    if (impl.options.trace)
        impl.trace = std::make_unique<detail::Trace>(impl);
    if (impl.vk.vkGetMemoryHostPointerPropertiesEXT == nullptr)
        impl.info.host_import_alignment = 0; // an adopted device without the extension
    if (impl.vk.vkCmdCuLaunchKernelNVX == nullptr)
        std::erase(impl.info.features, detail::kBinaryImport); // likewise
    if (impl.vk.vkGetMemoryFdKHR == nullptr)
        impl.info.imports_opaque_memory = false; // likewise
    impl.allocator = std::make_unique<detail::Allocator>(impl);
    impl.kernels = std::make_unique<detail::KernelCache>(impl);
    impl.pump = std::make_unique<detail::Pump>(impl);
    detail::choose_gemm_class(impl, impl.options.gemm_class);
}

} // namespace

Device::Device() : impl_(std::make_unique<Impl>(*this)) {
}

namespace {

void leave_out_features(Device::Impl& impl) {
    const std::vector<std::string>& without = impl.options.leave_out;
    std::erase_if(impl.info.features, [&](const std::string& name) {
        return std::find(without.begin(), without.end(), name) != without.end();
    });
}

} // namespace

std::unique_ptr<Device> Device::create(DeviceOptions options) {
    std::unique_ptr<Device> device(new Device());
    Impl& impl = *device->impl_;
    impl.options = std::move(options);
    impl.own_instance =
        impl.options.validation ? detail::Instance::with_validation() : detail::Instance::shared();
    impl.instance = impl.own_instance->handle();
    impl.vki = impl.own_instance->functions();
    impl.get_instance_proc = detail::system_loader();
    if (impl.options.validation)
        create_messenger(impl);
    detail::PhysicalDevice physical =
        detail::choose(detail::inspect_all(*impl.own_instance), impl.options.select);
    impl.physical_device = physical.handle;
    impl.info = physical.info;
    impl.has_memory_budget = physical.has_memory_budget;
    create_vulkan_device(impl, physical);
    leave_out_features(impl);
    furnish(impl);
    return device;
}

namespace {

void require_family(const ExternalQueue& queue,
                    const std::vector<VkQueueFamilyProperties>& families, bool no_graphics_queue) {
    const auto refuse = [&](const std::string& why) {
        throw Error(ErrorCode::InvalidArgument, std::string("the adopted queue for ") +
                                                    to_string(queue.role) + " is of family " +
                                                    std::to_string(queue.family) + ", " + why);
    };
    if (queue.family >= families.size())
        refuse("but the device has " + std::to_string(families.size()) + " families");
    const bool computes = (families[queue.family].queueFlags & VK_QUEUE_COMPUTE_BIT) != 0;
    if (takes_dispatches(queue.role) && !computes)
        refuse("which does not compute");
    if (no_graphics_queue && (families[queue.family].queueFlags & VK_QUEUE_GRAPHICS_BIT) != 0)
        refuse("which has graphics, though ExternalDevice::no_graphics_queue is set");
}

} // namespace

std::unique_ptr<Device> Device::adopt(const ExternalDevice& external, DeviceOptions options) {
    if (external.instance == VK_NULL_HANDLE || external.device == VK_NULL_HANDLE ||
        external.queues.empty() || external.queues.front().queue == VK_NULL_HANDLE)
        throw Error(ErrorCode::InvalidArgument,
                    "an adopted device needs its instance, device and at least one queue");
    std::unique_ptr<Device> device(new Device());
    Impl& impl = *device->impl_;
    impl.owns_device = false;
    impl.options = std::move(options);
    impl.lock_queues = external.lock_queues;
    impl.unlock_queues = external.unlock_queues;
    impl.get_instance_proc = external.get_instance_proc != nullptr ? external.get_instance_proc
                                                                   : detail::system_loader();
    impl.instance = external.instance;
    impl.physical_device = external.physical_device;
    impl.device = external.device;
    detail::load_instance_functions(impl.vki, impl.instance, impl.get_instance_proc);
    detail::load_device_functions(impl.vk, impl.device, impl.vki.vkGetDeviceProcAddr);
    detail::PhysicalDevice physical = detail::inspect(impl.vki, impl.physical_device, 0);
    impl.info = physical.info;
    impl.has_memory_budget = physical.has_memory_budget;
    detail::require_serves(impl.info);
    if (external.no_graphics_queue)
        impl.info.features.push_back(kNoGraphicsQueue);
    leave_out_features(impl);
    std::array<std::optional<std::uint32_t>, kNumQueueRoles> of_role{};
    for (const ExternalQueue& queue : external.queues) {
        require_family(queue, physical.queue_families, external.no_graphics_queue);
        auto same = std::find_if(impl.queues.begin(), impl.queues.end(),
                                 [&](const auto& q) { return q->handle == queue.queue; });
        const auto index = static_cast<std::uint32_t>(same - impl.queues.begin());
        if (same == impl.queues.end()) {
            auto made = std::make_unique<Impl::Queue>();
            made->handle = queue.queue;
            made->family = queue.family;
            made->timestamp_bits = physical.queue_families.at(queue.family).timestampValidBits;
            impl.queues.push_back(std::move(made));
        }
        of_role[static_cast<std::size_t>(queue.role)] = index;
    }
    const auto of = [&of_role](QueueRole role) -> std::optional<std::uint32_t>& {
        return of_role[static_cast<std::size_t>(role)];
    };
    if (!of(QueueRole::ComputeDeferredBeside))
        of(QueueRole::ComputeDeferredBeside) = of(QueueRole::ComputeDeferred);
    for (std::size_t role = 0; role < kNumQueueRoles; ++role) // what is left out shares Compute's
        impl.queue_of_role[role] = of_role[role].value_or(of(QueueRole::Compute).value_or(0));
    furnish(impl);
    return device;
}

namespace {

/// A semaphore that has its value may still be in a driver's hands for a moment. On a queue of the
/// application's its own work may come before; that is not waited for beyond that moment.
void drain_queues(Device::Impl& impl) noexcept {
    constexpr std::uint64_t kMomentNs = 1'000'000'000;
    const VkFenceCreateInfo info{VK_STRUCTURE_TYPE_FENCE_CREATE_INFO, nullptr, 0};
    for (const auto& queue : impl.queues) {
        VkFence fence = VK_NULL_HANDLE;
        if (impl.vk.vkCreateFence(impl.device, &info, nullptr, &fence) != VK_SUCCESS)
            continue;
        if (impl.lock_queues)
            impl.lock_queues();
        VkResult result = impl.vk.vkQueueSubmit2(queue->handle, 0, nullptr, fence);
        if (impl.unlock_queues)
            impl.unlock_queues();
        const bool submitted = result == VK_SUCCESS;
        if (submitted)
            result = impl.vk.vkWaitForFences(impl.device, 1, &fence, VK_TRUE,
                                             impl.owns_device ? 10 * kMomentNs : kMomentNs);
        if (!submitted || result == VK_SUCCESS)
            impl.vk.vkDestroyFence(impl.device, fence, nullptr); // else the queue still has it
    }
}

} // namespace

Device::~Device() {
    Impl& impl = *impl_;
    if (impl.device != VK_NULL_HANDLE) {
        if (impl.pump) {
            {
                const std::scoped_lock lock(impl.mutex);
                impl.pump->fail_held(Error(ErrorCode::Aborted, "the device is being destroyed"));
            }
            try {
                wait_idle(std::chrono::seconds(10));
            } catch (const Error&) {
                // What hangs is lost with the device.
            }
            const std::scoped_lock lock(impl.mutex);
            if (impl.pump->idle())
                drain_queues(impl);
        }
        try {
            if (impl.kernels)
                save_pipeline_cache();
        } catch (const Error&) {
            // Only a cache.
        }
        impl.pump.reset();
        impl.allocator.reset();
        impl.kernels.reset();
        for (const VkCommandPool pool : impl.spare_commands.give_up())
            impl.vk.vkDestroyCommandPool(impl.device, pool, nullptr);
        for (auto& queue : impl.queues)
            impl.vk.vkDestroySemaphore(impl.device, queue->timeline.semaphore, nullptr);
        if (impl.owns_device)
            impl.vk.vkDestroyDevice(impl.device, nullptr);
    }
    if (impl.messenger != VK_NULL_HANDLE)
        impl.vki.vkDestroyDebugUtilsMessengerEXT(impl.instance, impl.messenger, nullptr);
}

const DeviceInfo& Device::info() const noexcept {
    return impl_->info;
}
const DeviceOptions& Device::options() const noexcept {
    return impl_->options;
}

bool Device::has_feature(std::string_view name) const noexcept {
    const auto& features = impl_->info.features;
    return std::find(features.begin(), features.end(), name) != features.end();
}

std::string Device::why_not(const KernelInfo& kernel, std::uint32_t variant) const {
    return impl_->kernels->why_not(kernel, variant);
}

bool Device::distinct_queues(QueueRole a, QueueRole b) const noexcept {
    return impl_->queue_index(a) != impl_->queue_index(b);
}

std::string Device::describe_queues() const {
    std::string text;
    for (std::size_t role = 0; role < impl_->queue_of_role.size(); ++role) {
        const std::uint32_t queue = impl_->queue_of_role[role];
        text += (text.empty() ? "" : ", ") + std::string(to_string(static_cast<QueueRole>(role))) +
                " on queue " + std::to_string(queue) + " (family " +
                std::to_string(impl_->queues[queue]->family) + ")";
    }
    return text;
}

TimePoint Device::submit(Recording& recording, std::span<const TimePoint> waits) {
    Recording::Impl& work = recording.impl();
    if (&work.device != this)
        throw Error(ErrorCode::InvalidArgument,
                    recording.name() + " was recorded for another device");
    if (work.last_run != nullptr && !work.last_run->final_state())
        TimePoint(work.last_run).wait();
    work.allocate_table();
    std::vector<TicketPtr> tickets;
    for (const TimePoint& wait : waits)
        if (wait.ticket() != nullptr)
            tickets.push_back(wait.ticket());
    const std::scoped_lock lock(impl_->mutex);
    impl_->throw_if_failed();
    TimePoint point(impl_->pump->submit(work, std::move(tickets), nullptr));
    impl_->throw_if_failed();
    return point;
}

void Device::begin_gathering() {
    const std::scoped_lock lock(impl_->mutex);
    impl_->pump->begin_gathering();
}

void Device::end_gathering() noexcept {
    const std::scoped_lock lock(impl_->mutex);
    try {
        impl_->pump->end_gathering();
    } catch (const std::exception& error) {
        impl_->set_failure(
            Error(ErrorCode::Internal, std::string("gathered work: ") + error.what()));
    }
}

void Device::wait_idle(std::chrono::milliseconds timeout) {
    const auto deadline = Clock::now() + timeout;
    std::unique_lock lock(impl_->mutex);
    for (;;) {
        impl_->pump->advance(detail::Pump::Flush::Gathered);
        if (impl_->pump->idle() && impl_->num_lane_jobs == 0)
            break;
        if (Clock::now() > deadline)
            throw Error(ErrorCode::Timeout,
                        "waited " + std::to_string(timeout.count()) + " ms for the device; " +
                            impl_->pump->describe_pending() + "; " +
                            std::to_string(impl_->num_lane_jobs) + " lane jobs have not ended");
        impl_->changed.wait_for(lock, std::chrono::microseconds(200));
    }
    impl_->throw_if_failed();
}

void Device::abort(const Error& error) {
    const std::scoped_lock lock(impl_->mutex);
    impl_->set_failure(error);
    impl_->pump->fail_held(error);
}

void Device::upload(BufferView destination, std::span<const std::byte> bytes) {
    if (bytes.size() != destination.bytes)
        throw Error(ErrorCode::InvalidArgument, "uploading " + std::to_string(bytes.size()) +
                                                    " bytes to a view of " +
                                                    std::to_string(destination.bytes));
    if (bytes.empty())
        return;
    const std::uint64_t padded = (bytes.size() + 3) / 4 * 4;
    Buffer staging(*this, {.name = "upload", .bytes = padded, .kind = MemoryKind::Upload});
    std::memcpy(staging.mapped(), bytes.data(), bytes.size());
    Recording copy(*this, QueueRole::Compute, "upload");
    copy.copy(staging.view().sub(0, bytes.size()), destination);
    submit(copy).wait();
}

void Device::download(BufferView source, std::span<std::byte> bytes) {
    if (bytes.size() != source.bytes)
        throw Error(ErrorCode::InvalidArgument, "downloading a view of " +
                                                    std::to_string(source.bytes) + " bytes to " +
                                                    std::to_string(bytes.size()));
    if (bytes.empty())
        return;
    Buffer staging(*this,
                   {.name = "download", .bytes = bytes.size(), .kind = MemoryKind::Readback});
    Recording copy(*this, QueueRole::Compute, "download");
    copy.copy(source, staging.view());
    submit(copy).wait();
    std::memcpy(bytes.data(), staging.mapped(), bytes.size());
}

MemoryReport Device::memory_report() const {
    const std::scoped_lock lock(impl_->mutex);
    return impl_->allocator->report();
}

void Device::save_pipeline_cache() {
    impl_->kernels->save();
}

std::uint64_t Device::num_checked_accesses() const {
    const std::scoped_lock lock(impl_->mutex);
    return impl_->checker ? impl_->checker->num_checked() : 0;
}

std::string Device::trace_as(std::string op) {
    const std::scoped_lock lock(impl_->mutex);
    return std::exchange(impl_->traced_op, std::move(op));
}

void Device::add_to_trace(TraceEvent event) {
    if (!impl_->trace) // made with the device
        return;
    const std::scoped_lock lock(impl_->mutex);
    impl_->trace->add_beside(std::move(event));
}

std::vector<TraceEvent> Device::take_trace() {
    const std::scoped_lock lock(impl_->mutex);
    if (!impl_->trace)
        return {};
    impl_->pump->collect();
    return impl_->trace->take();
}

bool DeviceOptions::checks_by_default() noexcept {
#ifdef NDEBUG
    return false;
#else
    return true;
#endif
}

DeviceOptions DeviceOptions::from_environment(DeviceOptions base) {
    const auto flag = [](const char* name, bool& value) {
        const char* text = std::getenv(name);
        if (text == nullptr || *text == 0)
            return;
        if (std::strcmp(text, "0") != 0 && std::strcmp(text, "1") != 0)
            throw Error(ErrorCode::InvalidArgument,
                        std::string(name) + " must be 0 or 1, not \"" + text + "\"");
        value = *text == '1';
    };
    flag("BELLOWS_CHECK", base.check_happens_before);
    flag("BELLOWS_VALIDATION", base.validation);
    flag("BELLOWS_ROLES_APART", base.roles_apart);
    if (const char* device = std::getenv("BELLOWS_DEVICE"))
        base.select = device;
    if (const char* gemm_class = std::getenv("BELLOWS_GEMM_CLASS"))
        base.gemm_class = gemm_class;
    if (const char* without = std::getenv("BELLOWS_LEAVE_OUT")) {
        std::istringstream names(without);
        for (std::string name; std::getline(names, name, ',');)
            if (!name.empty())
                base.leave_out.push_back(name);
    }
    if (const char* text = std::getenv("BELLOWS_NATIVE"); text != nullptr && *text != '\0') {
        if (std::strcmp(text, "on") != 0 && std::strcmp(text, "off") != 0)
            throw Error(ErrorCode::InvalidArgument,
                        "BELLOWS_NATIVE must be on or off, not \"" + std::string(text) + "\"");
        if (std::strcmp(text, "off") == 0)
            base.leave_out.push_back(detail::kBinaryImport);
    }
    if (const char* text = std::getenv("BELLOWS_SYNC")) {
        const std::string mode = text;
        const std::string seed = mode.size() > 8 ? mode.substr(8) : "";
        const bool seeded = mode.rfind("shuffle:", 0) == 0 && !seed.empty() && seed.size() < 20 &&
                            seed.find_first_not_of("0123456789") == std::string::npos;
        if (mode == "serial") {
            base.sync = SyncMode::Serial;
        } else if (mode == "overlap" || mode.empty()) {
            base.sync = SyncMode::Overlap;
        } else if (mode == "shuffle" || seeded) {
            base.sync = SyncMode::Shuffle;
            if (seeded)
                base.shuffle_seed = std::stoull(seed);
        } else {
            throw Error(ErrorCode::InvalidArgument,
                        "BELLOWS_SYNC must be serial, overlap or shuffle[:seed], not \"" + mode +
                            "\"");
        }
    }
    return base;
}

} // namespace bellows
