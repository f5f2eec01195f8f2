// SPDX-License-Identifier: MIT
#include <bellows/comm/launch.hpp>
#include <bellows/comm/mpi_interop.hpp>
#include <bellows/comm/phase.hpp>
#include <bellows/comm/world.hpp>

#include "mpi_context.hpp"
#include "process_state.hpp"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>

namespace bellows {

struct WorldAccess {
    static World make(std::unique_ptr<World::Impl> impl) { return World(std::move(impl)); }
};

namespace {

constexpr const char* kStarting = "while MPI was starting";
constexpr const char* kRanksPerNode = "BELLOWS_RANKS_PER_NODE";

// 0: as MPI sees it.
int ranks_per_node_from(const WorldOptions& options) {
    if (options.ranks_per_node) {
        if (*options.ranks_per_node < 1)
            throw Error(ErrorCode::InvalidArgument, "ranks_per_node is " +
                                                        std::to_string(*options.ranks_per_node) +
                                                        "; it must be at least 1");
        return *options.ranks_per_node;
    }
    const char* text = std::getenv(kRanksPerNode);
    if (!text || !*text)
        return 0;
    int value = 0;
    const char* end = text + std::strlen(text);
    const auto [stop, problem] = std::from_chars(text, end, value);
    if (problem != std::errc{} || stop != end || value < 1)
        throw Error(ErrorCode::InvalidArgument, std::string(kRanksPerNode) + " is '" + text +
                                                    "'; it must be a whole number, at least 1");
    return value;
}

// Every rank's wish, or its error, in one exchange, so that a bad value on one rank fails on all.
int agreed_ranks_per_node(const MpiContext& mpi, const WorldOptions& options) {
    std::string mine;
    try {
        mine = std::to_string(ranks_per_node_from(options));
    } catch (const Error& error) {
        mine = error.message();
    }
    const std::vector<std::string> all = mpi.all_gather(mine);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
        const bool is_number = all[rank].find_first_not_of("0123456789") == std::string::npos;
        if (!is_number)
            throw Error(ErrorCode::InvalidArgument,
                        "rank " + std::to_string(rank) + ": " + all[rank], static_cast<int>(rank));
        if (all[rank] != all[0])
            throw Error(ErrorCode::InvalidArgument,
                        "ranks per node is " + all[0] + " on rank 0 but " + all[rank] +
                            " on rank " + std::to_string(rank) +
                            " (0: not given); set it alike on every rank",
                        static_cast<int>(rank));
    }
    return std::stoi(all[0]);
}

World make_world(MPI_Comm original, const WorldOptions& options, bool owns_mpi) {
    auto mpi = std::make_unique<MpiContext>(original, options.control.setup_timeout);
    const int ranks_per_node = agreed_ranks_per_node(*mpi, options);
    Topology topology = ranks_per_node > 0 ? Topology::blocks(mpi->size(), ranks_per_node)
                                           : Topology(mpi->node_leaders());
    const MpiContext& context = *mpi;
    auto control = std::make_unique<ControlPlane>(
        mpi->rank(), mpi->size(), options.control,
        [&context](const std::string& bytes) { return context.all_gather(bytes); });
    auto progress = std::make_unique<MpiProgress>(*mpi, *control);
    return WorldAccess::make(std::make_unique<World::Impl>(
        World::Impl{std::move(mpi), std::move(topology), std::move(control), options.close_timeout,
                    std::uncaught_exceptions(), owns_mpi, false, 0, std::move(progress), 0,
                    options.mpi_end_timeout}));
}

} // namespace

World World::init(int& argc, char**& argv, const WorldOptions& options) {
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized)
        throw Error(ErrorCode::InvalidArgument,
                    "MPI is already started; use join_world with a communicator");
    report_alive(launched_rank());
    const int rank = std::max(launched_rank(), 0);
    begin_phase(rank, kStarting, options.mpi_start_timeout);
    int level = MPI_THREAD_SINGLE;
    check_mpi(MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    begin_phase(rank, kStarting);
    World world = make_world(MPI_COMM_WORLD, options, true);
    report_started(world.rank());
    world.enter_phase("while the run was set up");
    return world;
}

World World::single(const WorldOptions& options) {
    ranks_per_node_from(options);
    auto control = std::make_unique<ControlPlane>(0, 1, options.control, ControlPlane::AllGather{});
    return World(std::make_unique<Impl>(Impl{nullptr, Topology::blocks(1, 1), std::move(control),
                                             options.close_timeout, std::uncaught_exceptions()}));
}

World join_world(MPI_Comm communicator, const WorldOptions& options) {
    return make_world(communicator, options, false);
}

MPI_Comm communicator(const World& world) noexcept {
    return world.impl().mpi ? world.impl().mpi->communicator() : MPI_COMM_NULL;
}

std::unique_lock<std::recursive_mutex> lock_mpi(const World& world) {
    return world.impl().mpi ? world.impl().mpi->lock() : std::unique_lock<std::recursive_mutex>();
}

World::World(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {
}
World::World(World&&) noexcept = default;

namespace {

/// Process ids of the ranks on this host, by rank.
std::map<int, pid_t> local_peers(const ControlPlane& control) {
    std::map<int, pid_t> peers;
    for (int peer = 0; peer < control.size(); ++peer)
        if (peer != control.rank() && control.can_pass_fds(peer))
            peers[peer] = static_cast<pid_t>(control.peer_pid(peer));
    return peers;
}

std::string who_is_stuck(const std::map<int, pid_t>& peers) {
    std::string text;
    for (const auto& [rank, process] : peers) {
        const char* state = is_stopped(process)  ? " is stopped"
                            : !is_alive(process) ? " has ended"
                                                 : nullptr;
        if (state)
            text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " (pid " +
                    std::to_string(process) + ")" + state;
    }
    return text.empty() ? "another rank may hang or be unreachable" : text;
}

} // namespace

World::~World() {
    if (!impl_ || impl_->closed)
        return;
    if (std::uncaught_exceptions() > impl_->exceptions_at_start)
        impl_->control->abort(
            Error(ErrorCode::PeerLost, "left the job because of an exception", rank()));
    try {
        close();
    } catch (...) { // a destructor cannot tell; who wants to know calls close()
    }
}

void World::enter_phase(const std::string& phase) {
    impl_->control->enter_phase(phase);
    if (impl_->owns_mpi)
        begin_phase(rank(), phase);
}

void World::close() {
    if (impl_->closed)
        return;
    impl_->closed = true;
    ControlPlane& control = *impl_->control;
    control.throw_if_failed();
    enter_phase("while closing");
    if (control.any_lost()) { // MPI would wait for them
        control.leave();
        if (impl_->progress)
            impl_->progress->stop();
        return;
    }
    try {
        control.barrier(impl_->close_timeout, "closing the world");
    } catch (const Error& error) {
        // All work is done: a rank that does not come now is not slow, it hangs.
        const bool hangs = error.code() == ErrorCode::Timeout && error.rank() >= 0;
        const Error told =
            hangs ? Error(ErrorCode::PeerLost, error.message(), error.rank()) : error;
        control.abort(told);
        throw told;
    }
    control.leave();
    if (!impl_->mpi)
        return;
    impl_->progress->stop();
    impl_->mpi->free();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!impl_->owns_mpi || finalized)
        return;
    begin_phase(rank(), "while closing, in MPI_Finalize", impl_->mpi_end_timeout,
                [peers = local_peers(control)] { return who_is_stuck(peers); });
    check_mpi(MPI_Finalize(), "MPI_Finalize");
    begin_phase(rank(), "after closing");
}

int World::rank() const noexcept {
    return impl_->control->rank();
}
int World::size() const noexcept {
    return impl_->control->size();
}
int World::node() const noexcept {
    return impl_->topology.node(rank());
}
int World::num_nodes() const noexcept {
    return impl_->topology.num_nodes();
}
int World::local_rank() const noexcept {
    return impl_->topology.local_rank(rank());
}
int World::local_size() const noexcept {
    return impl_->topology.local_size(rank());
}
std::span<const int> World::ranks_of_node(int node) const {
    return impl_->topology.ranks_of_node(node);
}
const Topology& World::topology() const noexcept {
    return impl_->topology;
}
ControlPlane& World::control() noexcept {
    return *impl_->control;
}
const ControlPlane& World::control() const noexcept {
    return *impl_->control;
}

namespace {

World make_world(const WorldOptions& options) {
    if (!is_launched())
        return World::single(options);
    int argc = 0;
    char** argv = nullptr;
    return World::init(argc, argv, options);
}

} // namespace

int in_world(const std::function<int(World&)>& body, const WorldOptions& options) {
    World world = make_world(options);
    int code = 0;
    try {
        code = body(world);
    } catch (const Error& error) {
        if (world.size() == 1)
            throw;
        world.control().abort(error);
        if (const auto cause = world.control().failure())
            throw Error(*cause); // what really happened, on every rank
        throw;
    } catch (const std::exception& error) {
        world.control().abort(Error(ErrorCode::Internal, error.what(), world.rank()));
        throw;
    }
    world.close();
    return code;
}

} // namespace bellows
