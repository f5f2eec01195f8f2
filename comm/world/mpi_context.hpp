// SPDX-License-Identifier: MIT
#pragma once

// What the MPI-using files share: checked calls, the lock that MPI_THREAD_SERIALIZED needs, and
// collectives that poll with a time limit instead of blocking.

#include "deadline.hpp"
#include "mpi_progress.hpp"

#include <bellows/comm/mpi_interop.hpp>
#include <bellows/comm/world.hpp>

#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// Throws Error{Mpi} with MPI's own text and code unless result is MPI_SUCCESS.
void check_mpi(int result, const char* call);

class MpiContext {
public:
    /// Collective: duplicates communicator. Throws Error{Unsupported} for a thread level too low.
    MpiContext(MPI_Comm communicator, Milliseconds setup_timeout);
    MpiContext(const MpiContext&) = delete;
    MpiContext& operator=(const MpiContext&) = delete;

    MPI_Comm communicator() const noexcept { return communicator_; }
    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }

    /// Held around every MPI call; locks only if MPI does not do so itself.
    [[nodiscard]] std::unique_lock<std::recursive_mutex> lock() const {
        return needs_lock_ ? std::unique_lock(mutex_) : std::unique_lock<std::recursive_mutex>();
    }

    /// The same unless somebody holds it; then empty.
    [[nodiscard]] std::optional<std::unique_lock<std::recursive_mutex>> try_lock() const {
        std::unique_lock guard(mutex_, std::defer_lock);
        if (needs_lock_ && !guard.try_lock())
            return std::nullopt;
        return guard;
    }

    /// A further duplicate of the communicator, which returns errors. Collective; polls. control
    /// may be null during set-up.
    MPI_Comm duplicate(MPI_Comm original, Milliseconds timeout, const ControlPlane* control) const;
    /// Collective; polls.
    std::vector<std::string> all_gather(const std::string& bytes) const;
    /// For each rank the lowest rank that it can share memory with. Collective.
    std::vector<int> node_leaders() const;
    /// Frees the duplicate; only while all ranks are healthy.
    void free() noexcept;

private:
    void wait(MPI_Request& request, const char* what, Milliseconds timeout,
              const ControlPlane* control) const;

    MPI_Comm communicator_ = MPI_COMM_NULL;
    int rank_ = 0;
    int size_ = 1;
    Milliseconds timeout_;
    bool needs_lock_ = false;
    mutable std::recursive_mutex mutex_;
};

/// What a World is made of.
struct World::Impl {
    std::unique_ptr<MpiContext> mpi; ///< null for World::single()
    Topology topology;
    std::unique_ptr<ControlPlane> control;
    std::chrono::milliseconds close_timeout;
    int exceptions_at_start = 0;
    bool owns_mpi = false;
    bool closed = false;
    std::uint64_t node_memories = 0;         ///< made so far, which is collective
    std::unique_ptr<MpiProgress> progress{}; ///< null as mpi
    std::uint64_t device_links = 0;          ///< as node_memories
    std::chrono::milliseconds mpi_end_timeout{};
};

} // namespace bellows
