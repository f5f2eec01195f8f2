// SPDX-License-Identifier: MIT
#pragma once

// Times of what all ranks do together. Collective; the thread of main() calls.

#include "support/spread.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/world.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace bellows::bench {

/// Of every wait for other ranks.
inline constexpr std::chrono::minutes kTimeLimit{4};

struct TimingOptions {
    std::uint64_t repeats = 5;  ///< at least
    double seconds = 0.5;       ///< of all repeats, at least
    double warm_up_seconds = 0; ///< before, at least; always twice
};

struct Timing {
    Spread seconds;         ///< over the repeats, of the longest of all ranks
    double p99 = 0;         ///< of the same
    double cpu_seconds = 0; ///< of all ranks together, per repeat
    std::uint64_t repeats = 0;
};

class Stopwatch {
public:
    /// Collective. world must outlive it.
    explicit Stopwatch(World& world);

    World& world() noexcept { return world_; }
    HostCollectives& host() noexcept { return host_; }

    /// All ranks come together and go on at the same moment, as far as MPI can do that.
    void meet();
    /// `begin` runs on each rank when it is warm, before the first timed repeat.
    Timing time(
        const std::function<void()>& once, const TimingOptions& options,
        const std::function<void()>& begin = [] {});

private:
    struct Repeat {
        double longest = 0, cpu = 0;
    };
    Repeat run(const std::function<void()>& once);

    World& world_;
    HostCollectives host_;
};

} // namespace bellows::bench
