// SPDX-License-Identifier: MIT
#pragma once

// MPI implementations may keep back what a done message still owes its peer (a small one that has
// only been buffered, the answer to a large one) until the next MPI call. So a thread makes one
// from time to time, however long nobody else has reason to. It passes when somebody else is in
// MPI, and is over once the job has failed.

#include <bellows/comm/control_plane.hpp>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace bellows {

class MpiContext;

class MpiProgress {
public:
    /// Both must outlive it.
    MpiProgress(const MpiContext& mpi, const ControlPlane& control)
        : mpi_(mpi), control_(control) {}
    ~MpiProgress() { stop(); }

    /// Something is under way. Any thread.
    void wake();
    /// For good, before MPI is finalised.
    void stop() noexcept;

private:
    void run() noexcept;
    void call() const noexcept;

    const MpiContext& mpi_;
    const ControlPlane& control_;
    std::atomic<bool> posted_{false};
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ends_ = false;
    std::thread thread_;
};

} // namespace bellows
