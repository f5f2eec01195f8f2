// SPDX-License-Identifier: MIT
#pragma once

// A Vulkan device with its queues, memory, kernels and submit pump. Everything else of the engine
// hangs on one Device and must be destroyed before it. Thread-safe.
//
// Order of work: submissions and lane jobs take effect as if executed one after another in the
// order in which they were handed in. The device runs them concurrently and out of order as far
// as the accesses they declare allow.

#include <bellows/engine/memory.hpp>
#include <bellows/engine/recording.hpp>
#include <bellows/engine/time_point.hpp>
#include <bellows/engine/trace.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

/// One physical device as `bellows info` shows it.
struct DeviceInfo {
    std::uint32_t index = 0;
    std::string name;
    std::string driver; ///< driver name and version
    std::string uuid;   ///< 32 hexadecimal digits
    std::string api_version;
    bool is_cpu = false;
    std::uint64_t memory_bytes = 0; ///< largest device-local heap
    std::uint32_t subgroup_size = 0;
    std::uint32_t shared_memory_bytes = 0;
    std::uint32_t max_workgroup_invocations = 0;
    std::uint32_t max_workgroup_subgroups = 0; ///< of subgroup_size invocations
    std::array<std::uint32_t, 3> max_workgroup_count{};
    /// What the addresses and sizes of imported host memory are multiples of (Buffer::import_host);
    /// 0: the device takes none.
    std::uint64_t host_import_alignment = 0;
    bool imports_opaque_memory = false; ///< Buffer::import_opaque
    double timestamp_period_ns = 0;
    std::uint32_t processors = 0;                  ///< that share out workgroups; 0: unknown
    std::vector<std::string> features;             ///< names that kernel variants may require
    std::vector<std::string> unmet_requirements;   ///< why Bellows cannot use it; empty when it can
    std::vector<std::string> cooperative_matrices; ///< e.g. "16x16x16 bf16->f32 subgroup"
};

/// All Vulkan devices of this machine, usable or not. Throws Error{Unsupported} when there is no
/// Vulkan loader.
std::vector<DeviceInfo> list_devices();

/// How submitted work is ordered. All three give the same bits; the others exist to prove it.
enum class SyncMode : std::uint8_t {
    Overlap, ///< as the declared accesses allow
    Serial,  ///< one after another, with full barriers
    Shuffle, ///< a random legal order (DeviceOptions::shuffle_seed)
};

/// Seeded mistakes for the tests of the happens-before checker and of errors; each index counts
/// from the device's creation, -1 is off.
struct FaultInjection {
    std::int64_t drop_barrier = -1;      ///< leave out this derived barrier inside recordings
    std::int64_t drop_wait = -1;         ///< leave out this derived wait of a batch or lane job
    std::int64_t release_too_early = -1; ///< reuse this released memory without waiting
    std::int64_t lose_device = -1;       ///< the driver calls the device lost at this submission
};

struct DeviceOptions {
    /// "" (best), "gpu", "cpu", an index of list_devices(), or a UUID.
    std::string select;
    SyncMode sync = SyncMode::Overlap;
    std::uint64_t shuffle_seed = 1;
    /// Throws Error{Internal} at submission of a race.
    bool check_happens_before = checks_by_default();
    /// Fills released and new memory of every kind with 0xff: NaN as f32 and bf16, a huge count.
    bool poison_freed_memory = false;
    /// Of create(): a queue in the engine's books for each role, though several may be one VkQueue.
    /// Tests see what orders roles on devices that have fewer.
    bool roles_apart = false;
    bool validation = false; ///< Khronos validation layer; messages fail the device
    bool trace = false;
    /// Compiled pipelines are kept in this file, with a key of device and driver added to its name;
    /// "" keeps them in memory only. A file that is damaged or cannot be written is no error.
    std::string pipeline_cache_file;
    /// Numeric class of products of bf16 tensors (gemm_plan.hpp): "" for the best that the device
    /// takes by itself, or a name. Device::create throws Error{Unsupported} when it lacks that.
    std::string gemm_class;
    /// Features that kernels are to do without where the device has them, as has_feature() names
    /// them: to see what devices run that lack them. Without "no_graphics_queue" create() takes a
    /// queue of a family with graphics where there is one.
    std::vector<std::string> leave_out;
    /// Called after each first use of a kernel; num_compiled counts from 1.
    std::function<void(const std::string& kernel, std::uint32_t num_compiled)> on_pipeline_compiled;
    FaultInjection faults;

    /// True when the engine was built with assertions (preset dev and the sanitizers').
    static bool checks_by_default() noexcept;
    /// `base` with BELLOWS_SYNC=serial|overlap|shuffle[:seed], BELLOWS_CHECK=0|1,
    /// BELLOWS_VALIDATION=0|1, BELLOWS_ROLES_APART=0|1, BELLOWS_DEVICE, BELLOWS_GEMM_CLASS,
    /// BELLOWS_LEAVE_OUT=feature,feature and BELLOWS_NATIVE=on|off applied. Throws
    /// Error{InvalidArgument}.
    static DeviceOptions from_environment(DeviceOptions base);
};

struct ExternalDevice;

class Device {
public:
    static std::unique_ptr<Device> create(DeviceOptions options);
    /// Uses an existing device (vulkan_interop.hpp); it is not destroyed by Bellows. Throws
    /// Error{Unsupported} that names what its physical device lacks of RequiredFeatures,
    /// Error{InvalidArgument} for queues that cannot serve their roles.
    static std::unique_ptr<Device> adopt(const ExternalDevice& external, DeviceOptions options);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const DeviceInfo& info() const noexcept;
    const DeviceOptions& options() const noexcept;
    bool has_feature(std::string_view name) const noexcept;
    /// "" when this device and build can run the variant, else why not.
    std::string why_not(const KernelInfo& kernel, std::uint32_t variant) const;
    /// True when two roles are served by different VkQueues.
    bool distinct_queues(QueueRole a, QueueRole b) const noexcept;
    std::string describe_queues() const;

    /// Hands the recording in. If its previous run is still pending, waits for that first.
    /// Throws what an earlier submission failed with, if one did.
    /// waits: beside those that the accesses imply.
    TimePoint submit(Recording& recording, std::span<const TimePoint> waits = {});
    /// Until end_gathering(), what is handed in while its queue is at work goes there together, up
    /// to some recordings at a time, sooner if anybody waits: between two calls of the driver a GPU
    /// idles for some microseconds. See Gathering.
    void begin_gathering();
    void end_gathering() noexcept;
    /// Waits until all submitted work and lane jobs have been reached.
    void wait_idle(std::chrono::milliseconds timeout = TimePoint::kDefaultTimeout);
    /// Fails everything that is pending or held with `error`, and all later submissions.
    void abort(const Error& error);

    /// Host copies through a staging buffer; the call returns when done. Sizes are those of the
    /// view. For set-up, tests and small results, not for the inner loop.
    void upload(BufferView destination, std::span<const std::byte> bytes);
    void download(BufferView source, std::span<std::byte> bytes);
    /// The same with what a std::span can be made of: a vector, an array, a span.
    template <class Values>
        requires requires(const Values& values) { std::span(values); }
    void upload(BufferView destination, const Values& values) {
        const std::span<const std::byte> bytes = std::as_bytes(std::span(values));
        upload(destination, bytes);
    }
    template <class Values>
        requires requires(Values& values) { std::as_writable_bytes(std::span(values)); }
    void download(BufferView source, Values&& values) {
        const std::span<std::byte> bytes = std::as_writable_bytes(std::span(values));
        download(source, bytes);
    }

    MemoryReport memory_report() const;
    /// Writes compiled pipelines to options().pipeline_cache_file; called by the destructor too.
    void save_pipeline_cache();
    /// Accesses that the happens-before checker has proved ordered; 0 when it is off.
    std::uint64_t num_checked_accesses() const;
    /// What is handed in from now on, work and lane jobs, is part of `op` (TraceEvent::op), e.g.
    /// "F0.m3", until the next call; "" of nothing. Returns what the call before has said.
    std::string trace_as(std::string op);
    /// Adds what the caller has timed itself, a message or a wait, on the host's steady clock;
    /// nothing without options().trace. Events of one lane that overlap are shown on further lanes
    /// "<lane> (2)", ...
    void add_to_trace(TraceEvent event);
    /// Chrome trace events recorded so far (trace.hpp); empty unless options().trace.
    std::vector<TraceEvent> take_trace();

    struct Impl;
    Impl& impl() const noexcept { return *impl_; }

private:
    Device();
    std::unique_ptr<Impl> impl_;
};

/// What a scope hands in, with few calls of the driver. It should not wait, nor take long.
class Gathering {
public:
    explicit Gathering(Device& device) : device_(device) { device_.begin_gathering(); }
    ~Gathering() { device_.end_gathering(); }
    Gathering(const Gathering&) = delete;
    Gathering& operator=(const Gathering&) = delete;

private:
    Device& device_;
};

/// Device::trace_as() for a scope; at its end what was said before it holds again.
class TracedAs {
public:
    TracedAs(Device& device, std::string op)
        : device_(device), before_(device.trace_as(std::move(op))) {}
    ~TracedAs() { device_.trace_as(std::move(before_)); }
    TracedAs(const TracedAs&) = delete;
    TracedAs& operator=(const TracedAs&) = delete;

private:
    Device& device_;
    std::string before_;
};

} // namespace bellows
