// SPDX-License-Identifier: MIT
#pragma once

// Host lanes: in-order sequences of host work (an exchange, a checkpoint writer) that take part
// in the device's order of work. A HostThread runs the first job of each of its lanes by polling,
// so jobs must not block: a job that waits for a message says Again and is asked once more. A lane
// owns a timeline that the host signals at the end of each job.

#include <bellows/engine/recording.hpp>
#include <bellows/engine/time_point.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

enum class Progress : std::uint8_t {
    Again, ///< it waits: ask again after a nap
    Soon,  ///< it waits for what is about to come: ask again without a nap
    Moved, ///< it has done something and could do more at once
    Done,
};

struct DeclaredAccess {
    BufferView view;
    Access access = Access::Read;
};

/// What a running job may do with the device.
class LaneContext {
public:
    /// Submits work on behalf of the job. Its accesses must lie within those that the job
    /// declares; no waits are derived from them: it comes after the job's own waits, `waits`, and
    /// what the job has submitted before, on whatever queue. Does not block.
    TimePoint submit(Recording& recording, std::span<const TimePoint> waits = {});
    /// The same without the last: beside what the job has submitted before.
    TimePoint submit_beside(Recording& recording, std::span<const TimePoint> waits = {});
    /// As submit_beside(), but this job may end before the work does: it becomes the lane's next
    /// job's, which must declare its accesses, too, and itself touches nothing that it writes.
    TimePoint submit_for_next(Recording& recording, std::span<const TimePoint> waits = {});
    /// Binds a declared buffer for the work that comes after this job. The job must have declared
    /// a write to the whole buffer, so that all earlier users have finished.
    void bind(Buffer& buffer, std::uint64_t bytes);
    /// The same to host memory of the caller, as Buffer::import_host takes it.
    void bind(Buffer& buffer, std::span<std::byte> host_memory);
    /// The same to memory of the device, as Buffer::import_opaque takes it.
    void bind(Buffer& buffer, OpaqueMemory memory);
    /// For the trace: what the job does from now on, e.g. "waits for counts", until the next call
    /// that says something else or the job's end. Cheap; nothing without DeviceOptions::trace.
    void phase(std::string_view what);

    struct Impl;
    explicit LaneContext(Impl& impl) noexcept : impl_(impl) {}

private:
    enum class Order : std::uint8_t { InOrder, Beside, ForNext };
    TimePoint submit(Recording& recording, std::span<const TimePoint> waits, Order order);

    Impl& impl_;
};

struct LaneJob {
    std::string name;
    /// Beside those that the accesses imply. Timelines of the caller (wrap_timeline) hold the job
    /// back for no longer than `timeout`: then it fails with Error{Timeout}.
    std::vector<TimePoint> waits;
    std::vector<DeclaredAccess> accesses; ///< device memory that the job (or work it submits) uses
    /// Called on the HostThread once all waits have been reached, until it says Done. What it
    /// throws fails the job's time point and everything that depends on it.
    std::function<Progress(LaneContext&)> step;
    /// Called on the HostThread when the job fails: its step, one of its waits, its time limit, or
    /// the device. Before anybody sees the failed time point, so that others can be told the cause
    /// first. Not called for jobs given up with their thread. Must not throw or block.
    std::function<void(const Error&)> on_failure = nullptr;
    std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout; ///< from its first step on
    /// What it waits for before its first step and after its last is about to come, too: for the
    /// first milliseconds there are no naps, which take a core.
    bool prompt = false;
};

class HostThread;

class Lane {
public:
    Lane(Lane&&) noexcept;
    ~Lane();
    /// Any thread. The order of post() calls is the order of the jobs.
    TimePoint post(LaneJob job);
    const std::string& name() const noexcept;

    struct Impl;

private:
    friend class HostThread;
    explicit Lane(std::shared_ptr<Impl> impl);
    std::shared_ptr<Impl> impl_;
};

class HostThread {
public:
    HostThread(Device& device, std::string name);
    /// Fails what has not begun with Error{Aborted}; waits for running steps, which are short.
    ~HostThread();
    Lane add_lane(std::string name);
    /// Test aid: delays the start and the end of every job by a random time up to `most`.
    void delay_jobs(std::chrono::microseconds most, std::uint64_t seed);

    struct Impl;

private:
    std::shared_ptr<Impl> impl_;
};

} // namespace bellows
