// SPDX-License-Identifier: MIT
#pragma once

// The set of ranks that work together: who I am, which node I am on, and the control plane that
// watches the others. The first thing a rank makes and the last it destroys; every transport and
// exchange lives inside its lifetime. Making, closing and destroying are collective. An MPI program
// that has its own communicator uses <bellows/comm/mpi_interop.hpp>.

#include <bellows/comm/control_plane.hpp>
#include <bellows/comm/topology.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace bellows {

struct WorldOptions {
    /// Pretends that nodes hold this many consecutive ranks. Unset: BELLOWS_RANKS_PER_NODE from the
    /// environment, else the nodes that MPI sees (ranks that can share memory). Same on every rank.
    std::optional<int> ranks_per_node;
    ControlOptions control;
    /// Limit of close() and of the destructor for the ranks to come together.
    std::chrono::milliseconds close_timeout{30'000};
    /// Limit of MPI_Init_thread() and of MPI_Finalize(), which nothing can end but the end of the
    /// process: it ends with code 4 and a message. 0: no limit.
    std::chrono::milliseconds mpi_start_timeout{180'000}, mpi_end_timeout{20'000};
};

class World {
public:
    /// Starts MPI (asking for MPI_THREAD_MULTIPLE) and owns it. Throws Error{InvalidArgument} if
    /// MPI was started already, Error{Unsupported} if it gives less than MPI_THREAD_SERIALIZED,
    /// Error{Mpi}, and what ControlPlane's constructor throws.
    static World init(int& argc, char**& argv, const WorldOptions& options = {});
    /// One rank, without MPI.
    static World single(const WorldOptions& options = {});

    World(World&&) noexcept;
    World& operator=(World&&) = delete;
    /// close() without its exceptions; when an exception is on its way past it, the job is aborted
    /// instead, so that the other ranks do not wait for this one.
    ~World();

    int rank() const noexcept;
    int size() const noexcept;
    int node() const noexcept;
    int num_nodes() const noexcept;
    int local_rank() const noexcept;
    int local_size() const noexcept;
    std::span<const int> ranks_of_node(int node) const;
    const Topology& topology() const noexcept;

    ControlPlane& control() noexcept;
    const ControlPlane& control() const noexcept;

    /// What this rank does from here on, for the messages of every rank that is lost meanwhile: "in
    /// step 12", "while writing a checkpoint".
    void enter_phase(const std::string& phase);

    /// Waits for all ranks, says goodbye, and finalises MPI if init() started it. Throws the job's
    /// failure, or Error{PeerLost} naming the ranks that do not come; MPI is then left as it is,
    /// since MPI_Finalize among survivors never returns. Later calls do nothing.
    void close();

    struct Impl; ///< internal
    /// internal: the parts that need MPI reach in through this
    Impl& impl() const noexcept { return *impl_; }

private:
    explicit World(std::unique_ptr<Impl> impl);
    friend struct WorldAccess;

    std::unique_ptr<Impl> impl_;
};

/// Runs `body` in a world of the ranks that mpirun or srun started, or of this one alone. What it
/// throws ends the job: every rank throws the error that was first, with the rank it is about.
int in_world(const std::function<int(World&)>& body, const WorldOptions& options = {});

} // namespace bellows
