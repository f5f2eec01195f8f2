// SPDX-License-Identifier: MIT
#pragma once

// Where device time lies on the host's steady clock: host = device + offset. Either the driver
// reads both clocks at one moment, or the offset is narrowed down from what is known of every
// batch: it began after the host handed it in and had ended when the host saw its end.

#include <algorithm>
#include <cstdint>
#include <limits>

namespace bellows::detail {

class ClockMap {
public:
    /// Both clocks, read at one moment; replaces what was known, as clocks drift.
    void read_together(std::int64_t device_ns, std::int64_t host_ns) noexcept {
        lowest_ = highest_ = host_ns - device_ns;
    }
    /// A batch that ran from begin to end in device time.
    void bracket(std::int64_t begin_device_ns, std::int64_t end_device_ns,
                 std::int64_t submitted_host_ns, std::int64_t observed_host_ns) noexcept {
        lowest_ = std::max(lowest_, submitted_host_ns - begin_device_ns);
        highest_ = std::min(highest_, observed_host_ns - end_device_ns);
    }
    /// False before the first of the two calls above.
    bool known() const noexcept { return highest_ != std::numeric_limits<std::int64_t>::max(); }
    /// The middle of what is possible; the device may begin at once but the host is late to look.
    std::int64_t offset_ns() const noexcept {
        return known() ? lowest_ + (highest_ - lowest_) / 2 : 0;
    }

private:
    std::int64_t lowest_ = std::numeric_limits<std::int64_t>::min();
    std::int64_t highest_ = std::numeric_limits<std::int64_t>::max();
};

} // namespace bellows::detail
