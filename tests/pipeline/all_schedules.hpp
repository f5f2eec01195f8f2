// SPDX-License-Identifier: MIT
#pragma once

// Every schedule of up to 16 ranks and 64 micro-batches.

#include <bellows/base/error.hpp>
#include <bellows/schedule/schedule.hpp>

#include <string>
#include <vector>

namespace bellows {

inline std::string name_of(const ScheduleDesc& desc) {
    return std::string(to_string(desc.kind)) + " of " + std::to_string(desc.ranks) + " ranks, " +
           std::to_string(desc.micro_batches) + " micro-batches, " + std::to_string(desc.chunks) +
           " chunks";
}

/// Those that are possible.
inline std::vector<ScheduleDesc> all_schedules() {
    std::vector<ScheduleDesc> all;
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind)
        for (std::uint64_t ranks = 1; ranks <= 16; ++ranks)
            for (std::uint64_t micro_batches = 1; micro_batches <= 64; ++micro_batches) {
                ScheduleDesc desc{static_cast<ScheduleKind>(kind), ranks, micro_batches};
                const bool chunked = desc.kind == ScheduleKind::Interleaved;
                for (desc.chunks = 2; desc.chunks <= (chunked ? 3u : 2u); ++desc.chunks) {
                    try {
                        (void)make_schedule(desc);
                        all.push_back(desc);
                    } catch (const Error&) { // which ImpossibleNumbersAreRefusedWithTheRule knows
                    }
                }
            }
    return all;
}

} // namespace bellows
