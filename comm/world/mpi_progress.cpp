// SPDX-License-Identifier: MIT
#include "mpi_progress.hpp"

#include "deadline.hpp"
#include "mpi_context.hpp"

#include <algorithm>

namespace bellows {

namespace {

constexpr Milliseconds kShortestNap{5}, kLongestNap{50};

} // namespace

void MpiProgress::wake() {
    if (posted_.exchange(true))
        return;
    const std::scoped_lock lock(mutex_);
    if (!ends_ && !thread_.joinable())
        thread_ = std::thread([this] { run(); });
}

void MpiProgress::stop() noexcept {
    std::thread thread;
    {
        const std::scoped_lock lock(mutex_);
        ends_ = true;
        thread = std::move(thread_);
    }
    changed_.notify_all();
    if (thread.joinable())
        thread.join();
}

void MpiProgress::run() noexcept {
    Milliseconds nap = kShortestNap;
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, nap, [this] { return ends_; }) && !control_.failed()) {
        nap = posted_.exchange(false) ? kShortestNap : std::min(2 * nap, kLongestNap);
        lock.unlock();
        call();
        lock.lock();
    }
}

void MpiProgress::call() const noexcept {
    const auto guard = mpi_.try_lock();
    if (!guard || control_.failed())
        return;
    int finalized = 0, arrived = 0;
    MPI_Finalized(&finalized);
    if (!finalized)
        MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, mpi_.communicator(), &arrived, MPI_STATUS_IGNORE);
}

} // namespace bellows
