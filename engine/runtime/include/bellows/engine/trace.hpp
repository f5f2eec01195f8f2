// SPDX-License-Identifier: MIT
#pragma once

// What ran when: device work by timestamps, host lanes by the clock (each job, what its lane waited
// for before it, what it says that it does, the messages that it moves), both in nanoseconds of the
// host's steady clock, so that ranks of one machine share a time axis. Device times are exact where
// DeviceInfo::features has "calibrated_timestamps", else good to about a submission's latency.

#include <cstdint>
#include <string>

namespace bellows {

/// The category of a lane's jobs.
inline constexpr const char* kJobCategory = "lane";

struct TraceEvent {
    std::string lane;     ///< a queue or a host lane, e.g. "compute", "exchange"
    std::string name;     ///< kernel, job, a job's phase, or a message
    std::string category; ///< the recording's label, e.g. "ATTN(F)"; a phase's job; kJobCategory
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
    /// Of device work and jobs: what Device::trace_as() said when they were handed in.
    std::string op{};
    std::string by{}; ///< of device work: the host lane whose job submitted it, or none

    bool is_job() const noexcept { return category == kJobCategory; }
};

} // namespace bellows
