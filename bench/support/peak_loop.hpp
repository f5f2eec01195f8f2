// SPDX-License-Identifier: MIT
#pragma once

// What the loops of peaks.hpp share.

#include "support/op_bench.hpp"

#include <algorithm>

namespace bellows::bench {

/// Seconds of one dispatch of `kernel`. Loops are steady: they need no more time than this,
/// whatever a program's --seconds.
template <class K>
double loop_seconds(Device& device, const K& kernel, std::uint32_t groups) {
    return time_recorded(
               device, [&](Recording& recording) { recording.dispatch(kernel, {groups}); },
               std::min(least_seconds(), 0.2))
        .median;
}

} // namespace bellows::bench
