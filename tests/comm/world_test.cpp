// SPDX-License-Identifier: MIT

// World and control plane on several ranks: agreement on who is where, messages, descriptors,
// barriers that name the missing, and errors that all ranks hear of.

#include "support/mpi_test.hpp"

#include <bellows/comm/mpi_interop.hpp>

#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::world;

std::vector<std::byte> pattern(std::size_t size, int seed) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i)
        bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed) * 7 + (i >> 8));
    return bytes;
}

TEST(World, RanksShareThisHost) {
    ALL_RANKS_TRUE(world().num_nodes() == 1 && world().local_size() == world().size());
    ALL_RANKS_TRUE(world().local_rank() == world().rank());
    ALL_RANKS_TRUE(communicator(world()) != MPI_COMM_NULL);
}

TEST(World, JoinsACommunicatorAndSimulatesNodes) {
    for (const int per_node : {1, 2, 3}) {
        WorldOptions options;
        options.ranks_per_node = per_node;
        World joined = join_world(MPI_COMM_WORLD, options);
        ALL_RANKS_TRUE(joined.rank() == world().rank() && joined.size() == world().size());
        ALL_RANKS_TRUE(joined.node() == world().rank() / per_node);
        ALL_RANKS_TRUE(joined.local_rank() == world().rank() % per_node);
        ALL_RANKS_TRUE(joined.num_nodes() == (world().size() + per_node - 1) / per_node);
        joined.close();
    }
    int finalized = 1;
    MPI_Finalized(&finalized);
    ALL_RANKS_TRUE(!finalized);
}

TEST(World, RanksPerNodeMustAgree) {
    WorldOptions options;
    options.ranks_per_node = world().rank() + 1;
    ErrorCode code = ErrorCode::Internal;
    try {
        join_world(MPI_COMM_WORLD, options);
    } catch (const Error& error) {
        code = error.code();
    }
    ALL_RANKS_TRUE(world().size() == 1 || code == ErrorCode::InvalidArgument);
}

class Mesh : public ::testing::TestWithParam<bool> {
protected:
    // A world of its own over Unix sockets or TCP.
    static World open() {
        WorldOptions options;
        options.control.force_tcp = GetParam();
        options.control.heartbeat_interval = 20ms;
        return join_world(MPI_COMM_WORLD, options);
    }
};

TEST_P(Mesh, MessagesArriveInOrderFromEveryoneToEveryone) {
    World mesh = open();
    ControlPlane& control = mesh.control();
    const std::size_t sizes[] = {0, 1, 100, 1 << 20, 3};
    for (int to = 0; to < mesh.size(); ++to)
        for (const std::size_t size : sizes)
            control.send(to, 42, pattern(size, mesh.rank() * 100 + to));
    bool good = true;
    for (int from = 0; from < mesh.size(); ++from)
        for (const std::size_t size : sizes)
            good = good && control.recv(from, 42, 30s) == pattern(size, from * 100 + mesh.rank());
    ALL_RANKS_TRUE(good);
    mesh.close();
}

TEST_P(Mesh, DescriptorsPassInsideAHost) {
    World mesh = open();
    ControlPlane& control = mesh.control();
    const int next = (mesh.rank() + 1) % mesh.size();
    const int previous = (mesh.rank() + mesh.size() - 1) % mesh.size();
    ALL_RANKS_TRUE(control.can_pass_fds(next) == (!GetParam() || next == mesh.rank()));
    FileDescriptor segment(::memfd_create("test", MFD_CLOEXEC));
    const int value = 1000 + mesh.rank();
    ASSERT_EQ(::write(segment.get(), &value, sizeof value), static_cast<ssize_t>(sizeof value));
    if (control.can_pass_fds(next)) {
        control.send(next, 1, pattern(1000, 1)); // bytes around it must not disturb it
        ALL_RANKS_TRUE(!control.try_recv_fd(previous, 3));
        control.send_fd(next, 2, segment.get());
        control.send_fd(next, 2, segment.get());
        control.send_fd(next, 3, segment.get());
        control.send(next, 1, pattern(10, 2));
        const FileDescriptor received = control.recv_fd(previous, 2, 30s);
        const FileDescriptor second = control.recv_fd(previous, 2, 30s);
        int read = 0;
        const bool same = ::pread(received.get(), &read, sizeof read, 0) == sizeof read &&
                          read == 1000 + previous && second && second.get() != received.get();
        ALL_RANKS_TRUE(same);
        std::optional<FileDescriptor> third;
        for (const auto end = std::chrono::steady_clock::now() + 30s;
             !third && std::chrono::steady_clock::now() < end;)
            third = control.try_recv_fd(previous, 3);
        ALL_RANKS_TRUE(third && *third && !control.try_recv_fd(previous, 3));
        ALL_RANKS_TRUE(control.recv(previous, 1, 30s) == pattern(1000, 1));
        ALL_RANKS_TRUE(control.recv(previous, 1, 30s) == pattern(10, 2));
    } else {
        ErrorCode code = ErrorCode::Internal;
        try {
            control.send_fd(next, 2, segment.get());
        } catch (const Error& error) {
            code = error.code();
        }
        ALL_RANKS_TRUE(code == ErrorCode::Unsupported);
    }
    mesh.close();
}

TEST_P(Mesh, BarrierHoldsEveryoneBack) {
    World mesh = open();
    const auto start = std::chrono::steady_clock::now();
    if (mesh.rank() == mesh.size() - 1)
        std::this_thread::sleep_for(200ms);
    mesh.control().barrier(30s);
    ALL_RANKS_TRUE(std::chrono::steady_clock::now() - start > 150ms || mesh.size() == 1);
    mesh.close();
}

TEST_P(Mesh, AbortReachesEveryone) {
    World mesh = open();
    std::atomic<int> called{0};
    const auto subscription = mesh.control().on_failure([&](const Error&) { ++called; });
    mesh.control().barrier(30s);
    world().control().barrier(30s); // nobody is still in the barrier before
    const int culprit = mesh.size() - 1;
    if (mesh.rank() == culprit)
        mesh.control().abort(Error(ErrorCode::DeviceLost, "the device is gone", -1, -4));
    ErrorCode code = ErrorCode::Internal;
    try {
        mesh.control().recv((mesh.rank() + 1) % mesh.size(), 1, 30s);
    } catch (const Error& error) {
        code = error.code();
    }
    ALL_RANKS_TRUE(code == ErrorCode::DeviceLost);
    const Error failure = *mesh.control().failure();
    ALL_RANKS_TRUE(failure.rank() == culprit && failure.detail() == -4);
    ALL_RANKS_TRUE(failure.message() == "rank " + std::to_string(culprit) + ": the device is gone");
    for (int i = 0; i < 5000 && called == 0; ++i)
        std::this_thread::sleep_for(1ms);
    ALL_RANKS_TRUE(called == 1);
}

TEST_P(Mesh, ALeaverIsNoLoss) {
    World mesh = open();
    mesh.control().barrier(30s);
    if (mesh.size() > 1 && mesh.rank() == 0) {
        mesh.control().send(1, 1, pattern(5, 0)); // sent before the goodbye, so it still arrives
        mesh.control().leave();
    }
    bool good = true;
    if (mesh.rank() == 1) {
        good = mesh.control().recv(0, 1, 30s) == pattern(5, 0);
        try {
            mesh.control().recv(0, 1, 30s);
            good = false;
        } catch (const Error& error) {
            good = good && error.code() == ErrorCode::PeerLost && error.rank() == 0;
        }
    }
    world().control().barrier(30s); // the outer world: rank 0 is out of the inner one
    good = good && !mesh.control().failed();
    ALL_RANKS_TRUE(good);
    mesh.control().leave();
}

TEST_P(Mesh, AnExceptionPastTheWorldTellsTheOthers) {
    const int culprit = world().size() - 1;
    Error failure(ErrorCode::Internal, "none");
    try {
        World mesh = open();
        mesh.control().barrier(30s);
        if (mesh.rank() == culprit)
            throw Error(ErrorCode::OutOfMemory, "the culprit's own");
        mesh.control().recv(culprit, 1, 30s);
    } catch (const Error& error) {
        failure = error;
    }
    ALL_RANKS_TRUE(failure.code() ==
                   (world().rank() == culprit ? ErrorCode::OutOfMemory : ErrorCode::PeerLost));
    ALL_RANKS_TRUE(world().rank() == culprit || failure.rank() == culprit);
}

INSTANTIATE_TEST_SUITE_P(Sockets, Mesh, ::testing::Bool(), [](const auto& mesh) {
    return mesh.param ? std::string("Tcp") : std::string("Unix");
});

TEST(ControlPlane, AgreementPicksTheWorst) {
    ControlPlane& control = world().control();
    EXPECT_FALSE(control.agree(std::nullopt, 30s));
    const int last = world().size() - 1;
    std::optional<Error> mine = Error(ErrorCode::InvalidArgument, "first");
    if (world().rank() == last)
        mine = Error(ErrorCode::Corrupt, "the worst");
    else if (world().rank() > 0)
        mine = Error(ErrorCode::Aborted, "a consequence");
    const auto worst = control.agree(mine, 30s);
    ALL_RANKS_TRUE(worst && worst->code() == ErrorCode::Corrupt && worst->rank() == last &&
                   worst->message() == "the worst");
    const auto tie = control.agree(Error(ErrorCode::Io, "same"), 30s);
    ALL_RANKS_TRUE(tie && tie->rank() == 0);
}

TEST(ControlPlane, BarrierNamesTheMissing) {
    World late = join_world(MPI_COMM_WORLD);
    const bool absent = late.rank() == late.size() - 1 && late.size() > 1;
    ErrorCode code = ErrorCode::Internal;
    std::string text;
    const auto start = std::chrono::steady_clock::now();
    if (!absent) {
        try {
            late.control().barrier(300ms, "the test's barrier");
        } catch (const Error& error) {
            code = error.code();
            text = error.message();
        }
    }
    const auto waited = std::chrono::steady_clock::now() - start;
    ALL_RANKS_TRUE(late.size() == 1 || absent || code == ErrorCode::Timeout);
    const std::string expected = "'the test's barrier' for rank " + std::to_string(late.size() - 1);
    ALL_RANKS_TRUE(late.size() == 1 || absent || text.find(expected) != std::string::npos);
    ALL_RANKS_TRUE(waited < 5s);
    late.control().leave();
}

} // namespace
} // namespace bellows
