// SPDX-License-Identifier: MIT
#include "ranks/timing.hpp"

#include <bellows/comm/mpi_interop.hpp>

#include <algorithm>
#include <ctime>
#include <vector>

namespace bellows::bench {

namespace {

double process_seconds() {
    timespec time{};
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

} // namespace

Stopwatch::Stopwatch(World& world)
    : world_(world), host_(world, Group::all(world.size()), kTimeLimit) {
}

void Stopwatch::meet() {
    // The first has a time limit, the second lets go of everybody at once.
    world_.control().barrier(kTimeLimit, "the start of a repeat");
    if (communicator(world_) == MPI_COMM_NULL)
        return;
    const auto lock = lock_mpi(world_);
    MPI_Barrier(MPI_COMM_WORLD);
}

Stopwatch::Repeat Stopwatch::run(const std::function<void()>& once) {
    meet();
    const double cpu = process_seconds();
    const auto begin = std::chrono::steady_clock::now();
    once();
    std::int64_t longest =
        std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    Repeat repeat;
    repeat.cpu = process_seconds() - cpu;
    host_.all_reduce_max(std::span(&longest, 1));
    repeat.longest = 1e-9 * static_cast<double>(longest);
    return repeat;
}

Timing Stopwatch::time(const std::function<void()>& once, const TimingOptions& options,
                       const std::function<void()>& begin) {
    // All ranks have the same times and so repeat as often.
    double warm = run(once).longest;
    do
        warm += run(once).longest;
    while (warm < options.warm_up_seconds);
    meet();
    begin();
    std::vector<double> times;
    double total = 0, cpu = 0;
    while (times.size() < options.repeats || total < options.seconds) {
        const Repeat repeat = run(once);
        times.push_back(repeat.longest);
        total += repeat.longest;
        cpu += repeat.cpu;
    }
    std::sort(times.begin(), times.end());
    return {spread_of(times), times[(times.size() - 1) * 99 / 100],
            host_.all_reduce_sum(cpu) / static_cast<double>(times.size()), times.size()};
}

} // namespace bellows::bench
