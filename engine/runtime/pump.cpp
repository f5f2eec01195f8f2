// SPDX-License-Identifier: MIT
#include "pump.hpp"

#include "device_impl.hpp"
#include "recording_impl.hpp"

#include <algorithm>
#include <utility>

namespace bellows::detail {

Pump::Pump(Device::Impl& device)
    : device_(device), given_(device.queues.size()), in_flight_(device.queues.size()),
      random_(device.options.shuffle_seed) {
}

void Pump::add_serial_wait(const TicketPtr& ticket, std::vector<TicketPtr>& waits) {
    if (device_.options.sync == SyncMode::Serial && last_ != nullptr &&
        std::find(waits.begin(), waits.end(), last_) == waits.end())
        waits.push_back(last_);
    last_ = ticket;
}

/// Every edge that accesses imply goes through here, so that a seeded fault can take any of them.
void Pump::add_derived_waits(std::vector<TicketPtr> derived, std::vector<TicketPtr>& waits) {
    for (TicketPtr& wait : derived)
        if (device_.num_waits++ != device_.options.faults.drop_wait)
            waits.push_back(std::move(wait));
}

void Pump::order_lane_job(const TicketPtr& ticket, std::vector<TicketPtr>& waits,
                          std::span<const std::pair<BufferView, Access>> accesses) {
    std::vector<TicketPtr> derived;
    for (const auto& [view, access] : accesses)
        if (view)
            view.resource->access(range_of(view), access, ticket, derived);
    add_derived_waits(std::move(derived), waits);
    add_serial_wait(ticket, waits);
    // What the host has done and ended need not be waited for; the checker must know of it.
    if (!device_.checker)
        std::erase_if(waits, [](const TicketPtr& wait) {
            return wait->state.load() == Ticket::State::Reached && wait->lane &&
                   wait->inner.empty();
        });
}

TicketPtr Pump::submit(Recording::Impl& recording, std::vector<TicketPtr> waits,
                       const VectorClock* lane_clock) {
    for (const TicketPtr& wait : waits)
        if (wait->device != nullptr && &wait->device->impl() != &device_)
            throw Error(ErrorCode::InvalidArgument,
                        recording.name + " waits for " + wait->name + " of another device");
    Batch batch;
    batch.recording = &recording;
    batch.queue = device_.queue_index(recording.role);
    batch.ticket = device_.new_ticket(recording.name);
    batch.ticket->actor = batch.queue;
    batch.inside_lane_job = lane_clock != nullptr;
    if (batch.inside_lane_job) {
        batch.base_clock = *lane_clock;
    } else {
        std::vector<TicketPtr> derived;
        for (const auto& use : recording.accesses())
            use.view.resource->access(range_of(use.view), use.access, batch.ticket, derived);
        add_derived_waits(std::move(derived), waits);
        add_serial_wait(batch.ticket, waits);
    }
    batch.waits = std::move(waits);
    recording.last_run = batch.ticket;
    TicketPtr ticket = batch.ticket;
    hold(std::move(batch));
    advance();
    return ticket;
}

/// Whether a batch may not be given to its queue yet. A failed wait does not: it fails the batch.
bool Pump::holds_back(const Ticket& wait) noexcept {
    const Ticket::State state = wait.state.load();
    return state == Ticket::State::Held || (state == Ticket::State::Submitted && wait.lane);
}

const Error* Pump::failed_wait(const Batch& batch) {
    for (const TicketPtr& wait : batch.waits)
        if (wait->state.load() == Ticket::State::Failed)
            return &*wait->error;
    return nullptr;
}

void Pump::hold(Batch batch) {
    const std::uint64_t place = num_submits_++;
    for (const TicketPtr& wait : batch.waits)
        if (holds_back(*wait)) {
            wait->held_batches.push_back(place);
            ++batch.num_open_waits;
        }
    if (batch.num_open_waits == 0 || failed_wait(batch) != nullptr)
        released_.insert(place);
    held_.emplace(place, std::move(batch));
}

/// The ticket holds nothing back any more.
void Pump::passed(Ticket& ticket) {
    const bool failed = ticket.state.load() == Ticket::State::Failed;
    for (const std::uint64_t place : std::exchange(ticket.held_batches, {})) {
        const auto batch = held_.find(place);
        if (batch != held_.end() && (--batch->second.num_open_waits == 0 || failed))
            released_.insert(place);
    }
}

/// To its queue, or to those that are shuffled, unless it fails with what it waited for.
void Pump::release(Batch batch) {
    if (const Error* error = failed_wait(batch)) {
        const Error copy = *error;
        finish(batch.ticket, Ticket::State::Failed, &copy);
    } else if (device_.options.sync == SyncMode::Shuffle) {
        ready_.push_back(std::move(batch));
    } else {
        give_to_queue(std::move(batch));
    }
}

void Pump::submit_one_at_random() {
    const std::size_t pick = random_() % ready_.size();
    Batch batch = std::move(ready_[pick]);
    ready_.erase(ready_.begin() + static_cast<std::ptrdiff_t>(pick));
    give_to_queue(std::move(batch));
}

void Pump::advance(Flush flush) {
    collect();
    release_all(flush != Flush::Nothing);
    for (std::uint32_t queue = 0; queue < given_.size(); ++queue)
        if (flush == Flush::Gathered || !gathers(queue))
            submit_given(queue);
}

void Pump::end_gathering() {
    if (--num_gathering_ == 0)
        advance();
}

void Pump::release_all(bool flush) {
    for (;;) {
        while (!released_.empty()) {
            auto batch = held_.extract(*released_.begin());
            released_.erase(released_.begin());
            if (!batch.empty()) // else all that was held has failed
                release(std::move(batch.mapped()));
        }
        if (!flush || ready_.empty())
            break;
        do // at times look again at what has become ready before the next choice
            submit_one_at_random();
        while (!ready_.empty() && random_() % 2 != 0);
    }
}

bool Pump::idle() const noexcept {
    const auto empty = [](const auto& queue) { return queue.empty(); };
    return held_.empty() && ready_.empty() && std::ranges::all_of(given_, empty) &&
           std::ranges::all_of(in_flight_, empty);
}

void Pump::finish(const TicketPtr& ticket, Ticket::State state, const Error* error) {
    if (ticket->final_state())
        return;
    if (error != nullptr) {
        ticket->error = *error;
        device_.set_failure(*error);
    }
    ticket->state.store(state, std::memory_order_release);
    if (state == Ticket::State::Reached && device_.checker)
        device_.checker->observed(*ticket);
    any_finished_ = true;
    passed(*ticket);
    device_.changed.notify_all();
}

void Pump::collect() {
    for (std::size_t index = 0; index < in_flight_.size(); ++index) {
        if (in_flight_[index].empty())
            continue;
        Device::Impl::Queue& queue = *device_.queues[index];
        std::uint64_t value = 0;
        const VkResult result =
            device_.vk.vkGetSemaphoreCounterValue(device_.device, queue.timeline.semaphore, &value);
        if (result != VK_SUCCESS || value == ~std::uint64_t{0}) { // the value of a lost device
            lose_device(result == VK_SUCCESS ? VK_ERROR_DEVICE_LOST : result, "reading a timeline");
            return;
        }
        while (!in_flight_[index].empty() && in_flight_[index].front().ticket->value <= value) {
            const Batch batch = std::move(in_flight_[index].front());
            in_flight_[index].pop_front();
            if (device_.trace)
                device_.trace->batch_done(*batch.recording, *batch.ticket, batch.queue,
                                          batch.submitted_ns);
            queue.last_reached = batch.ticket->name;
            finish(batch.ticket, Ticket::State::Reached, nullptr);
        }
    }
    if (std::exchange(any_finished_, false))
        device_.allocator->collect();
}

void Pump::poll_external(const TicketPtr& ticket) {
    std::uint64_t value = 0;
    const VkResult result =
        device_.vk.vkGetSemaphoreCounterValue(device_.device, ticket->timeline->semaphore, &value);
    if (result != VK_SUCCESS || value == ~std::uint64_t{0}) { // the value of a lost device
        const Error error = lose_device(result == VK_SUCCESS ? VK_ERROR_DEVICE_LOST : result,
                                        "reading " + ticket->name);
        finish(ticket, Ticket::State::Failed, &error);
    } else if (value >= ticket->value) {
        finish(ticket, Ticket::State::Reached, nullptr);
    }
}

Error Pump::lose_device(VkResult result, const std::string& what) {
    const auto any = [](const auto& queue) { return !queue.empty(); };
    const bool in_flight = std::ranges::any_of(in_flight_, any) || std::ranges::any_of(given_, any);
    if (device_.failure && device_.failure->code() == ErrorCode::DeviceLost && !in_flight)
        return *device_.failure;
    const Error error(ErrorCode::DeviceLost,
                      "the device " + device_.info.name + " was lost (" + result_name(result) +
                          " while " + what + ")" + breadcrumbs() +
                          ". What was in flight first is the likely cause: BELLOWS_SYNC=serial "
                          "narrows it down, BELLOWS_VALIDATION=1 checks how it is used",
                      -1, result);
    for (std::deque<Batch>& queue : in_flight_)
        for (const Batch& batch : std::exchange(queue, {}))
            finish(batch.ticket, Ticket::State::Failed, &error);
    fail_given(error);
    fail_held(error);
    return error;
}

std::string Pump::breadcrumbs() const {
    constexpr std::size_t kMostBatches = 4, kMostOperations = 6;
    std::string text;
    for (std::uint32_t index = 0; index < in_flight_.size(); ++index) {
        const Device::Impl::Queue& queue = *device_.queues[index];
        text += "; queue " + std::to_string(index) + ": " +
                (queue.last_reached.empty() ? "no batch had ended"
                                            : "the last batch to end was " + queue.last_reached) +
                ", in flight: ";
        std::size_t count = 0;
        for (const Batch& batch : in_flight_[index]) {
            if (++count > kMostBatches)
                continue;
            text += (count > 1 ? ", " : "") + batch.ticket->name + " (value " +
                    std::to_string(batch.ticket->value);
            // The operations of the oldest are what the device was at.
            const auto& operations = batch.recording->operations;
            for (std::size_t i = 0; count == 1 && i < operations.size(); ++i)
                text += i == kMostOperations ? ", ..."
                        : i > kMostOperations
                            ? ""
                            : (i == 0 ? ": " : ", ") + std::string(operations[i].name);
            text += ")";
        }
        if (count > kMostBatches)
            text += " and " + std::to_string(count - kMostBatches) + " more";
        text += count == 0 ? "nothing" : "";
    }
    if (!held_.empty())
        text += "; " + std::to_string(held_.size()) + " batches were held back";
    return text;
}

void Pump::fail_held(const Error& error) {
    std::vector<Batch> batches;
    batches.swap(ready_);
    for (auto& [place, batch] : held_)
        batches.push_back(std::move(batch));
    held_.clear();
    released_.clear();
    for (Batch& batch : batches)
        finish(batch.ticket, Ticket::State::Failed, &error);
}

std::string Pump::describe_pending() const {
    std::string text;
    const auto tell = [&](const auto& queues) {
        for (const auto& queue : queues)
            for (const Batch& batch : queue)
                text += (text.empty() ? "running: " : ", ") + batch.ticket->name;
    };
    tell(in_flight_);
    tell(given_);
    for (const auto& [place, batch] : held_) {
        text += (text.empty() ? "held: " : "; held: ") + batch.ticket->name + " (waits for";
        for (const TicketPtr& wait : batch.waits)
            if (wait->state.load() == Ticket::State::Held)
                text += " " + wait->name;
        text += ")";
    }
    return text.empty() ? "nothing" : text;
}

namespace {

/// The semaphores a batch has to wait for: the newest value of each timeline of another queue.
void add_semaphore_wait(std::vector<VkSemaphoreSubmitInfo>& infos, const Ticket& wait) {
    for (VkSemaphoreSubmitInfo& info : infos)
        if (info.semaphore == wait.timeline->semaphore) {
            info.value = std::max(info.value, wait.value);
            return;
        }
    VkSemaphoreSubmitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SUBMIT_INFO;
    info.semaphore = wait.timeline->semaphore;
    info.value = wait.value;
    info.stageMask = VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT;
    infos.push_back(info);
}

/// Physical ranges of an operation, for the checker.
std::vector<HappensBefore::AddressRange> address_ranges(const Recording::Impl& recording,
                                                        const Recording::Impl::Operation& op) {
    std::vector<HappensBefore::AddressRange> ranges;
    for (std::uint32_t i = 0; i < op.num_uses; ++i) {
        const auto& use = recording.uses[op.first_use + i];
        if (!use.view)
            continue;
        const Allocation& memory = use.view.resource->allocation;
        const Range range = range_of(use.view);
        ranges.push_back({memory.address + std::min(range.begin, memory.bytes),
                          memory.address + std::min(range.end, memory.bytes),
                          use.access != Access::Read});
    }
    return ranges;
}

} // namespace

/// Those of other queues that the batch waits for, which are submitted before it. Whether it waits
/// for its own queue, too.
bool Pump::take_semaphores(Batch& batch) {
    const Device::Impl::Queue& queue = *device_.queues[batch.queue];
    bool same_queue = false;
    const auto add = [&](const TicketPtr& wait) {
        if (wait->timeline == nullptr)
            return;
        if (wait->timeline == &queue.timeline)
            same_queue = true;
        else if (!wait->lane)
            add_semaphore_wait(batch.semaphores, *wait);
    };
    for (const TicketPtr& wait : batch.waits) {
        add(wait);
        for (const TicketPtr& inner : wait->inner) // what a lane job has submitted
            add(inner);
    }
    // Memory may have been bound since the waits were derived.
    for (const auto& use : batch.recording->uses)
        if (use.view && use.view.resource->allocation.poisoned != nullptr)
            add(use.view.resource->allocation.poisoned);
    for (const VkSemaphoreSubmitInfo& wait : batch.semaphores)
        for (std::uint32_t other = 0; other < device_.queues.size(); ++other)
            if (wait.semaphore == device_.queues[other]->timeline.semaphore &&
                !given_[other].empty() && given_[other].front().ticket->value <= wait.value)
                submit_given(other);
    return same_queue;
}

void Pump::give_to_queue(Batch batch) {
    Recording::Impl& recording = *batch.recording;
    Device::Impl::Queue& queue = *device_.queues[batch.queue];
    try {
        if (device_.failure)
            throw Error(*device_.failure);
        const bool same_queue = take_semaphores(batch) || device_.options.sync == SyncMode::Serial;
        if (device_.failure)
            throw Error(*device_.failure);
        if (device_.checker) {
            std::vector<HappensBefore::Operation> operations;
            for (const auto& op : recording.operations)
                operations.push_back({op.name, op.barrier_before, address_ranges(recording, op)});
            device_.checker->submit(batch.queue, *batch.ticket, batch.waits, same_queue,
                                    batch.inside_lane_job ? &batch.base_clock : nullptr,
                                    operations);
        }
        recording.prepare();
        recording.fill_table();
        batch.ticket->timeline = &queue.timeline;
        batch.ticket->value = ++queue.timeline.last_value;
        batch.ticket->state.store(Ticket::State::Submitted, std::memory_order_release);
        passed(*batch.ticket);
        batch.waits.clear();
        given_[batch.queue].push_back(std::move(batch));
        device_.changed.notify_all(); // who waits for it wants it to come
    } catch (const Error& error) {
        finish(batch.ticket, Ticket::State::Failed, &error);
    }
}

bool Pump::gathers(std::uint32_t queue) const noexcept {
    constexpr std::size_t kMost = 16;
    return num_gathering_ > 0 && !in_flight_[queue].empty() && given_[queue].size() < kMost &&
           std::ranges::none_of(given_[queue], &Batch::inside_lane_job);
}

/// A device that is said to be lost must not go on with its work, so this waits a while for what
/// the queue runs.
void Pump::let_end(std::uint32_t index) {
    constexpr std::uint64_t kLongest = 200'000'000; // ns; it may wait for the host
    if (in_flight_[index].empty())
        return;
    VkSemaphoreWaitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
    info.semaphoreCount = 1;
    info.pSemaphores = &device_.queues[index]->timeline.semaphore;
    info.pValues = &in_flight_[index].back().ticket->value;
    (void)device_.vk.vkWaitSemaphores(device_.device, &info, kLongest);
}

/// In one call: between two calls a GPU does nothing for some 10 us, between two batches of one for
/// 3.
void Pump::submit_given(std::uint32_t index) {
    std::vector<Batch>& batches = given_[index];
    if (batches.empty())
        return;
    Device::Impl::Queue& queue = *device_.queues[index];
    std::vector<VkCommandBufferSubmitInfo> buffers(batches.size());
    std::vector<VkSemaphoreSubmitInfo> signals(batches.size());
    std::vector<VkSubmitInfo2> infos(batches.size());
    bool loses = false;
    for (std::size_t i = 0; i < batches.size(); ++i) {
        buffers[i].sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_SUBMIT_INFO;
        buffers[i].commandBuffer = batches[i].recording->commands.buffer;
        signals[i].sType = VK_STRUCTURE_TYPE_SEMAPHORE_SUBMIT_INFO;
        signals[i].semaphore = queue.timeline.semaphore;
        signals[i].value = batches[i].ticket->value;
        signals[i].stageMask = VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT;
        infos[i].sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2;
        infos[i].waitSemaphoreInfoCount = static_cast<std::uint32_t>(batches[i].semaphores.size());
        infos[i].pWaitSemaphoreInfos = batches[i].semaphores.data();
        infos[i].commandBufferInfoCount = 1;
        infos[i].pCommandBufferInfos = &buffers[i];
        infos[i].signalSemaphoreInfoCount = 1;
        infos[i].pSignalSemaphoreInfos = &signals[i];
        loses |= device_.num_submissions++ == device_.options.faults.lose_device;
    }
    if (device_.lock_queues)
        device_.lock_queues();
    const std::int64_t now = Trace::now_ns();
    if (loses)
        let_end(index);
    const VkResult result =
        loses ? VK_ERROR_DEVICE_LOST
              : device_.vk.vkQueueSubmit2(queue.handle, static_cast<std::uint32_t>(infos.size()),
                                          infos.data(), VK_NULL_HANDLE);
    if (device_.unlock_queues)
        device_.unlock_queues();
    if (result != VK_SUCCESS) {
        const std::string what = "submitting " + batches.front().recording->name;
        try {
            if (result == VK_ERROR_DEVICE_LOST)
                throw lose_device(result, what);
            check(result, what);
        } catch (const Error& error) {
            fail_given(error);
        }
        return;
    }
    for (Batch& batch : batches) {
        batch.submitted_ns = now;
        batch.semaphores.clear();
        in_flight_[index].push_back(std::move(batch));
    }
    batches.clear();
    device_.changed.notify_all();
}

/// What other queues have been given may wait for it.
void Pump::fail_given(const Error& error) {
    for (std::vector<Batch>& queue : given_)
        for (const Batch& batch : std::exchange(queue, {}))
            finish(batch.ticket, Ticket::State::Failed, &error);
}

} // namespace bellows::detail
