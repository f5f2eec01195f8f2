// SPDX-License-Identifier: MIT
#include <bellows/engine/lane.hpp>

#include "device_impl.hpp"
#include "recording_impl.hpp"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <random>
#include <thread>
#include <utility>

namespace bellows {

using detail::Ticket;
using detail::TicketPtr;
using Clock = std::chrono::steady_clock;

struct LaneContext::Impl {
    Device* device = nullptr;
    const std::string* lane = nullptr;
    std::string job{}, op{};
    detail::VectorClock known{};
    std::vector<TicketPtr> inner{};
    std::vector<TicketPtr>* for_next = nullptr; ///< the lane's
    std::string phase{};                        ///< "" before the job has named one
    std::int64_t phase_began_ns = 0;

    /// Needs the mutex.
    void end_phase(std::int64_t now_ns) {
        if (!phase.empty() && device->impl().trace)
            device->impl().trace->add({*lane, phase, job, phase_began_ns, now_ns});
    }
};

TimePoint LaneContext::submit(Recording& recording, std::span<const TimePoint> waits) {
    return submit(recording, waits, Order::InOrder);
}

TimePoint LaneContext::submit_beside(Recording& recording, std::span<const TimePoint> waits) {
    return submit(recording, waits, Order::Beside);
}

TimePoint LaneContext::submit_for_next(Recording& recording, std::span<const TimePoint> waits) {
    return submit(recording, waits, Order::ForNext);
}

TimePoint LaneContext::submit(Recording& recording, std::span<const TimePoint> waits, Order order) {
    Device::Impl& device = impl_.device->impl();
    recording.impl().allocate_table();
    const std::scoped_lock lock(device.mutex);
    device.throw_if_failed();
    std::vector<TicketPtr> tickets;
    for (const TimePoint& wait : waits)
        if (wait.ticket() != nullptr)
            tickets.push_back(wait.ticket());
    if (order == Order::InOrder)
        for (const auto* before : {&impl_.inner, impl_.for_next})
            tickets.insert(tickets.end(), before->begin(), before->end());
    TicketPtr ticket = device.pump->submit(recording.impl(), std::move(tickets), &impl_.known);
    ticket->op = impl_.op;
    ticket->by = *impl_.lane;
    device.pump->advance(detail::Pump::Flush::Ready);
    (order == Order::ForNext ? *impl_.for_next : impl_.inner).push_back(ticket);
    return TimePoint(std::move(ticket));
}

void LaneContext::bind(Buffer& buffer, std::uint64_t bytes) {
    Device::Impl& device = impl_.device->impl();
    const std::scoped_lock lock(device.mutex);
    device.allocator->bind_in_order(*buffer.view().resource, bytes);
}

void LaneContext::bind(Buffer& buffer, std::span<std::byte> host_memory) {
    Device::Impl& device = impl_.device->impl();
    const std::scoped_lock lock(device.mutex);
    device.allocator->bind_host(*buffer.view().resource, host_memory);
}

void LaneContext::bind(Buffer& buffer, OpaqueMemory memory) {
    Device::Impl& device = impl_.device->impl();
    const std::scoped_lock lock(device.mutex);
    device.allocator->bind_opaque(*buffer.view().resource, memory);
}

void LaneContext::phase(std::string_view what) {
    Device::Impl& device = impl_.device->impl();
    if (!device.trace || what == impl_.phase)
        return;
    const std::int64_t now_ns = detail::Trace::now_ns();
    const std::scoped_lock lock(device.mutex);
    impl_.end_phase(now_ns);
    impl_.phase = what;
    impl_.phase_began_ns = now_ns;
}

struct Lane::Impl {
    struct Pending {
        LaneJob job;
        TicketPtr ticket;
        std::vector<TicketPtr> waits;
        std::optional<LaneContext::Impl> context; ///< set when it has begun
        Clock::time_point not_before, deadline, began;
        std::optional<Clock::time_point> waits_for_caller_since;
        std::string waits_for; ///< for the trace: what was not there at the first look
        std::int64_t waits_since_ns = 0;
        bool delayed = false;
        bool stepped_to_end = false;
        std::optional<Clock::time_point> first_look;

        /// The work of a job that does not end by itself.
        std::vector<TicketPtr> left(Lane::Impl& lane) const {
            std::vector<TicketPtr> all = std::exchange(lane.for_next, {});
            if (context)
                all.insert(all.end(), context->inner.begin(), context->inner.end());
            return all;
        }

        /// Whether it is looked at again without a nap.
        bool hurries() const {
            return job.prompt && Clock::now() - *first_look < std::chrono::milliseconds(5);
        }
    };

    Device& device;
    std::string name;
    std::uint32_t actor = 0;
    detail::Timeline timeline;
    std::shared_ptr<HostThread::Impl> thread;
    std::deque<Pending> jobs;        ///< guarded by the device's mutex
    std::vector<TicketPtr> for_next; ///< what has been submitted for the next job; likewise
};

struct HostThread::Impl {
    explicit Impl(Device& owner, std::string thread_name)
        : device(owner), name(std::move(thread_name)) {}

    void run();
    /// What a look at a lane's first job has shown.
    enum class Look : std::uint8_t { Nothing, Soon, Moved };
    Look poll(Lane::Impl& lane, Lane::Impl::Pending& job);
    /// Throws the failure of the device, or that the job has taken too long.
    void require_in_time(const Lane::Impl& lane, const Lane::Impl::Pending& job);
    bool begin(Lane::Impl& lane, Lane::Impl::Pending& job);
    bool waits_reached(Lane::Impl& lane, Lane::Impl::Pending& job);
    void end(Lane::Impl& lane, Lane::Impl::Pending& job);
    void fail(Lane::Impl& lane, Lane::Impl::Pending& job, const Error& error);
    Clock::duration random_delay();

    Device& device;
    std::string name;
    std::vector<std::shared_ptr<Lane::Impl>> lanes; ///< guarded by the device's mutex
    std::condition_variable_any wake;
    bool stop = false;
    std::chrono::microseconds most_delay{0};
    std::mt19937_64 random;
    std::thread thread;
};

Clock::duration HostThread::Impl::random_delay() {
    if (most_delay.count() == 0)
        return {};
    return std::chrono::microseconds(random() % static_cast<std::uint64_t>(most_delay.count() + 1));
}

void HostThread::Impl::run() {
    // Short naps leave the cores to those who work; where these are a CPU device's, it gets longer
    // ones when nothing comes.
    const std::uint32_t short_naps = device.info().is_cpu ? 200 : UINT32_MAX;
    std::uint32_t idle_rounds = 0;
    detail::DeviceMutex::go_first();
    std::unique_lock lock(device.impl().mutex);
    while (!stop) {
        bool busy = false, progressed = false, soon = false;
        for (std::size_t i = 0; i < lanes.size(); ++i) { // lanes come and go meanwhile
            if (lanes[i]->jobs.empty())
                continue;
            busy = true;
            const auto lane = lanes[i];
            Lane::Impl::Pending& job = lane->jobs.front(); // only this thread removes jobs
            lock.unlock();
            const Look look = poll(*lane, job);
            progressed |= look == Look::Moved;
            soon |= look == Look::Soon;
            lock.lock();
        }
        if (progressed) {
            idle_rounds = 0;
        } else if (!busy) {
            wake.wait_for(lock, std::chrono::milliseconds(100));
        } else if (soon || ++idle_rounds < 8) {
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        } else {
            wake.wait_for(lock, std::chrono::microseconds(idle_rounds < short_naps ? 50 : 250));
        }
    }
}

namespace {

/// What a job does, for the checker: late = false, to memory that stands when it begins; true, to
/// buffers that it may bind itself.
HappensBefore::Operation checked_accesses(const LaneJob& job, bool late) {
    HappensBefore::Operation operation{job.name.c_str(), false, {}};
    for (const DeclaredAccess& access : job.accesses) {
        if (!access.view || !access.view.resource->bound || access.view.resource->declared != late)
            continue;
        const auto& memory = access.view.resource->allocation;
        const detail::Range range = detail::range_of(access.view);
        operation.ranges.push_back({memory.address + std::min(range.begin, memory.bytes),
                                    memory.address + std::min(range.end, memory.bytes),
                                    access.access != Access::Read});
    }
    return operation;
}

} // namespace

/// Work of ours that the job waits for ends by limits of its own, a timeline of the caller only by
/// this job's limit.
bool HostThread::Impl::waits_reached(Lane::Impl& lane, Lane::Impl::Pending& job) {
    Device::Impl& impl = device.impl();
    const Ticket* of_caller = nullptr;
    for (const TicketPtr& wait : job.waits) {
        if (wait->is_external() && !wait->final_state())
            impl.pump->poll_external(wait);
        const Ticket::State state = wait->state.load();
        if (state == Ticket::State::Failed)
            throw Error(*wait->error);
        if (state == Ticket::State::Reached)
            continue;
        if (impl.trace && job.waits_for.empty()) {
            job.waits_for = wait->name;
            job.waits_since_ns = detail::Trace::now_ns();
        }
        if (!wait->is_external())
            return false;
        of_caller = wait.get();
    }
    if (of_caller == nullptr)
        return true;
    const auto now = Clock::now();
    if (!job.waits_for_caller_since)
        job.waits_for_caller_since = now;
    if (now - *job.waits_for_caller_since > job.job.timeout)
        throw Error(ErrorCode::Timeout,
                    job.job.name + " on " + lane.name + " has not begun: it waited more than " +
                        std::to_string(job.job.timeout.count()) + " ms for " + of_caller->name +
                        " to reach " + std::to_string(of_caller->value));
    return false;
}

bool HostThread::Impl::begin(Lane::Impl& lane, Lane::Impl::Pending& job) {
    Device::Impl& impl = device.impl();
    const std::scoped_lock lock(impl.mutex);
    impl.pump->advance(detail::Pump::Flush::Ready);
    if (!waits_reached(lane, job))
        return false;
    impl.throw_if_failed();
    if (!job.delayed) {
        job.delayed = true;
        job.not_before = Clock::now() + random_delay();
    }
    if (Clock::now() < job.not_before)
        return false;
    job.context.emplace(LaneContext::Impl{.device = &device,
                                          .lane = &lane.name,
                                          .job = job.job.name,
                                          .op = job.ticket->op,
                                          .inner = std::exchange(lane.for_next, {}),
                                          .for_next = &lane.for_next});
    if (impl.checker) {
        const HappensBefore::Operation operation = checked_accesses(job.job, false);
        job.context->known = impl.checker->begin_job(lane.actor, job.waits, operation);
    }
    job.began = Clock::now();
    job.deadline = job.began + job.job.timeout;
    if (!job.waits_for.empty())
        impl.trace->add({lane.name, "waits for " + job.waits_for, job.job.name, job.waits_since_ns,
                         job.began.time_since_epoch() / std::chrono::nanoseconds(1)});
    return true;
}

void HostThread::Impl::end(Lane::Impl& lane, Lane::Impl::Pending& job) {
    Device::Impl& impl = device.impl();
    Lane::Impl::Pending finished; // destroyed after the lock is released: it may own buffers
    const std::scoped_lock lock(impl.mutex);
    job.ticket->inner = std::move(job.context->inner);
    if (impl.checker)
        impl.checker->end_job(lane.actor, *job.ticket, checked_accesses(job.job, true));
    if (impl.trace) {
        const std::int64_t now_ns = detail::Trace::now_ns();
        job.context->end_phase(now_ns);
        impl.trace->add({lane.name, job.job.name, kJobCategory,
                         job.began.time_since_epoch() / std::chrono::nanoseconds(1), now_ns,
                         job.ticket->op});
    }
    lane.timeline.ended = job.ticket->value;
    if (lane.timeline.shown)
        impl.signal(lane.timeline, lane.name);
    impl.pump->finish(job.ticket, Ticket::State::Reached, nullptr);
    finished = std::move(job);
    lane.jobs.pop_front();
    --impl.num_lane_jobs;
    impl.pump->advance();
}

void HostThread::Impl::fail(Lane::Impl& lane, Lane::Impl::Pending& job, const Error& error) {
    if (job.job.on_failure)
        job.job.on_failure(error);
    Device::Impl& impl = device.impl();
    Lane::Impl::Pending finished;
    const std::scoped_lock lock(impl.mutex);
    job.ticket->inner = job.left(lane); // runs on
    impl.pump->finish(job.ticket, Ticket::State::Failed, &error);
    finished = std::move(job);
    lane.jobs.pop_front();
    --impl.num_lane_jobs;
    impl.pump->advance();
}

void HostThread::Impl::require_in_time(const Lane::Impl& lane, const Lane::Impl::Pending& job) {
    {
        const std::scoped_lock lock(device.impl().mutex);
        device.impl().throw_if_failed();
    }
    if (Clock::now() > job.deadline)
        throw Error(ErrorCode::Timeout, job.job.name + " on " + lane.name + " took more than " +
                                            std::to_string(job.job.timeout.count()) + " ms");
}

HostThread::Impl::Look HostThread::Impl::poll(Lane::Impl& lane, Lane::Impl::Pending& job) {
    if (!job.first_look)
        job.first_look = Clock::now();
    const auto waiting = [&job] { return job.hurries() ? Look::Soon : Look::Nothing; };
    try {
        if (!job.context)
            return begin(lane, job) ? Look::Moved : waiting();
        LaneContext context(*job.context);
        if (!job.stepped_to_end) {
            const Progress progress = job.job.step(context);
            if (progress != Progress::Done) {
                require_in_time(lane, job);
                return progress == Progress::Moved  ? Look::Moved
                       : progress == Progress::Soon ? Look::Soon
                                                    : Look::Nothing;
            }
            job.stepped_to_end = true;
            job.not_before = Clock::now() + random_delay();
        }
        if (Clock::now() < job.not_before)
            return waiting();
        // What it has submitted is part of the job.
        for (const TicketPtr& inner : job.context->inner)
            if (!TimePoint(inner).reached()) {
                require_in_time(lane, job);
                return waiting();
            }
        end(lane, job);
    } catch (const Error& error) {
        fail(lane, job, error);
    } catch (const std::exception& other) {
        fail(lane, job, Error(ErrorCode::Internal, job.job.name + ": " + other.what()));
    }
    return Look::Moved;
}

HostThread::HostThread(Device& device, std::string name)
    : impl_(std::make_shared<Impl>(device, std::move(name))) {
    impl_->thread = std::thread([impl = impl_.get()] { impl->run(); });
}

HostThread::~HostThread() {
    {
        const std::scoped_lock lock(impl_->device.impl().mutex);
        impl_->stop = true;
        impl_->wake.notify_all();
    }
    impl_->thread.join();
    Device::Impl& device = impl_->device.impl();
    std::deque<Lane::Impl::Pending> given_up; // destroyed after the lock is released
    const std::scoped_lock lock(device.mutex);
    for (const auto& lane : impl_->lanes) {
        for (auto& job : lane->jobs) {
            const Error error(ErrorCode::Aborted,
                              job.job.name + " was given up: its thread has ended");
            job.ticket->inner = job.left(*lane);
            device.pump->finish(job.ticket, Ticket::State::Failed, &error);
            given_up.push_back(std::move(job));
            --device.num_lane_jobs;
        }
        lane->jobs.clear();
        device.vk.vkDestroySemaphore(device.device, lane->timeline.semaphore, nullptr);
        lane->thread.reset();
    }
    device.pump->advance();
}

Lane HostThread::add_lane(std::string name) {
    Device::Impl& device = impl_->device.impl();
    auto lane = std::make_shared<Lane::Impl>(
        Lane::Impl{impl_->device, std::move(name), 0, {}, impl_, {}, {}});
    lane->timeline.semaphore = device.create_timeline();
    const std::scoped_lock lock(device.mutex);
    if (device.checker)
        lane->actor = device.checker->add_actor(lane->name);
    impl_->lanes.push_back(lane);
    return Lane(std::move(lane));
}

void HostThread::delay_jobs(std::chrono::microseconds most, std::uint64_t seed) {
    const std::scoped_lock lock(impl_->device.impl().mutex);
    impl_->most_delay = most;
    impl_->random.seed(seed);
}

Lane::Lane(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
}
Lane::Lane(Lane&&) noexcept = default;
Lane::~Lane() = default;

const std::string& Lane::name() const noexcept {
    return impl_->name;
}

TimePoint Lane::post(LaneJob job) {
    Device::Impl& device = impl_->device.impl();
    const std::scoped_lock lock(device.mutex);
    device.throw_if_failed();
    if (impl_->thread == nullptr)
        throw Error(ErrorCode::InvalidArgument, "lane " + impl_->name + " has no thread any more");
    Impl::Pending pending;
    pending.ticket = device.new_ticket(job.name);
    pending.ticket->lane = true;
    pending.ticket->actor = impl_->actor;
    pending.ticket->timeline = &impl_->timeline;
    pending.ticket->value = ++impl_->timeline.last_value;
    for (const TimePoint& wait : job.waits)
        if (wait.ticket() != nullptr)
            pending.waits.push_back(wait.ticket());
    std::vector<std::pair<BufferView, Access>> accesses;
    for (const DeclaredAccess& access : job.accesses)
        accesses.emplace_back(access.view, access.access);
    device.pump->order_lane_job(pending.ticket, pending.waits, accesses);
    pending.job = std::move(job);
    TimePoint point(pending.ticket);
    impl_->jobs.push_back(std::move(pending));
    ++device.num_lane_jobs;
    impl_->thread->wake.notify_all();
    return point;
}

} // namespace bellows
