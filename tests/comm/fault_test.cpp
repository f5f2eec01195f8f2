// SPDX-License-Identifier: MIT

// What happens when a rank is killed, stopped, throws or leaves: this program launches itself
// through mpirun, one rank does it, and the others must hear of it in seconds, whatever they wait
// in. Each survivor writes down what it saw; the launcher must return the exit code that a user
// would see.

#include "launched.hpp"

#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/launch.hpp>
#include <bellows/comm/mpi_interop.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <ostream>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace bellows {
namespace {

using namespace std::chrono_literals;
using testing::Seen;
using testing::SteadyClock;

std::string own_path() {
    return std::filesystem::read_symlink("/proc/self/exe").string();
}

// --- the ranks -----------------------------------------------------------------------------------

int exit_code_of(const Error& error) {
    switch (error.code()) {
    case ErrorCode::InvalidArgument:
        return 2;
    case ErrorCode::PeerLost:
        return 4;
    default:
        return 1;
    }
}

/// This process dies when it leaves MPI.
int last_signal = 0;      ///< that this rank raises in MPI_Finalize()
bool dies_in_mpi = false; ///< this rank, in MPI_Init_thread()
bool hangs_last = false;  ///< this rank, in MPI_Finalize()

[[noreturn]] void hang() {
    for (;;)
        ::pause();
}

void misbehave(const std::string& fault, World& world) {
    if (fault == "kill")
        ::raise(SIGKILL);
    if (fault == "stop")
        ::raise(SIGSTOP);
    if (fault == "exit")
        ::_exit(3);
    if (fault == "throw")
        throw std::runtime_error("not one of ours");
    if (fault == "abort")
        world.control().abort(Error(ErrorCode::InvalidArgument, "hidden size 7 does not divide"));
}

// What the others do meanwhile; none of it can succeed.
void wait_for_the_culprit(const std::string& phase, World& world, Transport& transport,
                          HostCollectives& collectives, int culprit) {
    std::vector<std::byte> bytes(std::size_t{8} << 20);
    if (phase == "receive" || phase == "send") {
        Transfer transfer = phase == "send" ? transport.post_send(culprit, {7, 0}, bytes)
                                            : transport.post_recv(culprit, {7, 0}, bytes);
        wait_all(transport, {&transfer, 1}, phase, 60s);
    } else if (phase == "barrier") {
        world.control().barrier(60s);
    } else if (phase == "message") {
        world.control().recv(culprit, 1, 60s);
    } else {
        collectives.all_reduce_sum(1.0);
    }
}

/// A program that has started MPI itself with a level below MPI_THREAD_MULTIPLE. What is wrong, or
/// nothing.
std::string run_own_mpi(int argc, char** argv, int level) {
    int given = MPI_THREAD_SINGLE;
    MPI_Init_thread(&argc, &argv, level, &given);
    std::string wrong;
    if (given != level)
        wrong = "MPI gives thread level " + std::to_string(given);
    try {
        World world = join_world(MPI_COMM_WORLD);
        if (level < MPI_THREAD_SERIALIZED)
            wrong = "a level below MPI_THREAD_SERIALIZED was taken";
        if (!lock_mpi(world).owns_lock())
            wrong = "MPI is not locked";
        HostCollectives collectives(world, Group::all(world.size()), 60s);
        std::vector<double> sums(300);
        std::thread bellows([&] {
            for (double& sum : sums)
                sum = collectives.all_reduce_sum(1.0);
        });
        for (int i = 0; i < 300; ++i) { // the caller's own traffic beside it
            int mine = i, all = 0;
            const auto lock = lock_mpi(world);
            MPI_Allreduce(&mine, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
            if (all != i * world.size())
                wrong = "a sum of the caller's is " + std::to_string(all);
        }
        bellows.join();
        for (const double sum : sums)
            if (sum != world.size())
                wrong = "a sum is " + std::to_string(sum);
    } catch (const Error& error) {
        if (error.code() != ErrorCode::Unsupported || level >= MPI_THREAD_SERIALIZED)
            wrong = error.message();
    }
    MPI_Finalize();
    return wrong;
}

int run_rank(int argc, char** argv) {
    const std::string phase = argv[2], fault = argv[3], folder = argv[4];
    dies_in_mpi = phase == "MPI" && launched_rank() == 1;
    if (phase == "own mpi") {
        const std::string wrong = run_own_mpi(
            argc, argv, fault == "serialized" ? MPI_THREAD_SERIALIZED : MPI_THREAD_FUNNELED);
        report_exit(launched_rank(), wrong.empty() ? 0 : 1, wrong);
        return wrong.empty() ? 0 : 1;
    }
    if (fault == "usage" && launched_rank() == 1) {
        report_exit(1, 2, "unknown option");
        return 2;
    }
    if (launched_rank() == 1)
        last_signal = fault == "die last" ? SIGKILL : fault == "stop last" ? SIGSTOP : 0;
    hangs_last = launched_rank() == 1 && fault == "hang last";
    int rank = -1, exit_code = 0;
    std::string reason;
    SteadyClock::time_point start;
    try {
        WorldOptions options;
        if (phase == "end")
            options.close_timeout = options.mpi_end_timeout = 3s;
        World world = World::init(argc, argv, options);
        rank = world.rank();
        world.enter_phase("in step 7");
        const auto transport = open_transport(world);
        HostCollectives collectives(world, Group::all(world.size()), 60s);
        const int culprit = world.size() > 1 ? 1 : 0;
        testing::barrier_left_last_by(world, culprit);
        start = SteadyClock::now();
        if (fault != "none" && !fault.ends_with(" last")) {
            if (rank == culprit) {
                std::ofstream(folder + "/culprit") << ::getpid();
                std::this_thread::sleep_for(100ms); // the others are well inside their waits
                misbehave(fault, world);
            }
            wait_for_the_culprit(phase, world, *transport, collectives, culprit);
        }
        if (fault == "hang before the last" && rank == 1)
            hang();
        world.close();
        if (fault == "hang behind the last" && rank == 1)
            hang();
    } catch (const Error& error) {
        exit_code = exit_code_of(error);
        reason = error.message();
        testing::write_seen(folder, rank, error, start);
    } catch (const std::exception& error) {
        exit_code = 1;
        reason = error.what();
    }
    report_exit(rank, exit_code, reason);
    if (fault == "hang at the very last" && rank == 1)
        hang();
    return exit_code;
}

// --- the tests -----------------------------------------------------------------------------------

// A process that has ended may stay as a zombie until its new parent looks.
bool is_alive(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    file >> number >> name >> state;
    return file && state != "Z" && state != "X";
}

class Faults : public testing::Launched {
protected:
    void expect_survivors_lost_rank_1(int ranks, long within_ms, const std::string& word) {
        for (int rank = 0; rank < ranks; ++rank) {
            if (rank == 1)
                continue;
            const Seen one = seen(rank);
            EXPECT_EQ(one.code, "PeerLost") << "rank " << rank;
            EXPECT_EQ(one.rank, 1) << "rank " << rank;
            EXPECT_LT(one.milliseconds, within_ms) << "rank " << rank;
            EXPECT_NE(one.message.find("rank 1"), std::string::npos) << one.message;
            EXPECT_NE(one.message.find(word), std::string::npos) << one.message;
            EXPECT_TRUE(word == "exception" || one.says(" saw it in step 7)")) << one.message;
        }
    }
};

TEST_F(Faults, ACallerMaySerializeItsOwnMpiCallsWithOurs) {
    const LaunchResult result = launch(3, "own mpi", "serialized");
    EXPECT_EQ(result.exit_code, 0) << result.reason;
}

TEST_F(Faults, LessThanSerializedIsRefused) {
    const LaunchResult result = launch(2, "own mpi", "funneled");
    EXPECT_EQ(result.exit_code, 0) << result.reason;
}

class KilledWhile : public Faults, public ::testing::WithParamInterface<const char*> {
protected:
    void expect_what_went_on(const std::string& phase) const;
};

/// Every survivor says what it was in the middle of, and how far that was.
void KilledWhile::expect_what_went_on(const std::string& phase) const {
    for (const int rank : {0, 2, 3}) {
        const Seen one = seen(rank);
        EXPECT_TRUE(one.says("; meanwhile rank " + std::to_string(rank) + " was in "))
            << one.message;
        if (phase == "receive") {
            EXPECT_TRUE(one.says("'receive', 0 of 1 messages done: from rank 1 expected 8388608 "
                                 "bytes, saw 0"))
                << one.message;
        } else if (phase == "send") {
            EXPECT_TRUE(one.says("'send', 0 of 1 messages done: to rank 1 expected 8388608 bytes"))
                << one.message;
        } else if (phase == "barrier") {
            EXPECT_TRUE(one.says(rank == 0 ? "'barrier', 3 of 4 ranks had come"
                                           : "'barrier', waiting for rank 0's answer"))
                << one.message;
        } else if (phase == "message") {
            EXPECT_TRUE(one.says("a wait for a control message (tag 1) of rank 1")) << one.message;
        } else {
            EXPECT_TRUE(one.says(rank == 0 ? "'gather: sizes', 2 of 3 messages done: from rank 1 "
                                             "expected 8 bytes, saw 0"
                                           : "'all-reduce: status', 0 of 1 messages done: from "
                                             "rank 0 expected 1 bytes, saw 0"))
                << one.message;
        }
    }
}

TEST_F(Faults, AGoodRunReturnsZero) {
    const LaunchResult result = launch(3, "none", "none");
    EXPECT_EQ(result.exit_code, 0) << result.reason;
    EXPECT_FALSE(result.killed);
}

TEST_P(KilledWhile, TheOthersHearOfItAtOnce) {
    const LaunchResult result = launch(4, GetParam(), "kill");
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    EXPECT_NE(result.reason.find("rank 1"), std::string::npos) << result.reason;
    EXPECT_FALSE(result.killed) << "every survivor must end by itself";
    expect_survivors_lost_rank_1(4, 5000, "died");
    expect_what_went_on(GetParam());
    EXPECT_LT(took_, 30s);
}

INSTANTIATE_TEST_SUITE_P(Phases, KilledWhile,
                         ::testing::Values("receive", "send", "barrier", "message", "collective"),
                         [](const auto& phase) { return std::string(phase.param); });

TEST_F(Faults, AStoppedRankIsCalledStalledAndItsProcessEnded) {
    ::setenv("BELLOWS_STALL_SECONDS", "2", 1);
    const LaunchResult result = launch(3, "receive", "stop");
    ::unsetenv("BELLOWS_STALL_SECONDS");
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    expect_survivors_lost_rank_1(3, 10'000, "stalled");
    pid_t culprit = 0;
    std::ifstream(folder_ + "/culprit") >> culprit;
    ASSERT_GT(culprit, 0);
    const auto deadline = std::chrono::steady_clock::now() + 5s; // the kernel takes its time
    while (is_alive(culprit) && std::chrono::steady_clock::now() < deadline)
        std::this_thread::sleep_for(10ms);
    EXPECT_FALSE(is_alive(culprit)) << "the stopped process is still there";
    EXPECT_LT(took_, 30s);
}

TEST_F(Faults, ARankThatThrowsTakesTheJobDownInOrder) {
    const LaunchResult result = launch(3, "receive", "throw");
    EXPECT_NE(result.exit_code, 0);
    EXPECT_FALSE(result.killed);
    expect_survivors_lost_rank_1(3, 5000, "exception");
}

TEST_F(Faults, ARankThatExitsWithoutAWordIsLost) {
    const LaunchResult result = launch(3, "collective", "exit");
    EXPECT_EQ(result.exit_code, 4);
    expect_survivors_lost_rank_1(3, 5000, "without a goodbye");
}

TEST_F(Faults, AnAbortBringsItsReasonToAll) {
    const LaunchResult result = launch(3, "message", "abort");
    EXPECT_EQ(result.exit_code, 2);
    for (int rank = 0; rank < 3; ++rank) {
        EXPECT_EQ(seen(rank).code, "InvalidArgument");
        EXPECT_EQ(seen(rank).message.rfind("rank 1: hidden size 7 does not divide", 0), 0u)
            << seen(rank).message;
    }
}

TEST_F(Faults, ARankThatNeverJoinsDoesNotHangTheOthers) {
    const LaunchResult result = launch(2, "message", "usage");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.rank, 1);
    EXPECT_EQ(result.reason, "unknown option");
    EXPECT_LT(took_, 30s);
}

// The control plane has been left by then: only the launcher can see it.
TEST_F(Faults, ARankThatDiesOnItsWayOutIsLost) {
    const LaunchResult result = launch(3, "none", "die last");
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    EXPECT_NE(result.reason.find("rank 1 "), std::string::npos) << result.reason;
    EXPECT_LT(took_, 30s);
}

// It lives, and nobody's heartbeats run any more.
TEST_F(Faults, ARankThatStopsOnItsWayOutIsGivenUp) {
    stopped_timeout_ = 2s;
    const LaunchResult result = launch(3, "none", "stop last");
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    EXPECT_EQ(result.rank, 1);
    EXPECT_NE(result.reason.find("is stopped while closing, in MPI_Finalize and was given up after "
                                 "2000 ms"),
              std::string::npos)
        << result.reason;
    EXPECT_LT(took_, 30s);
}

struct Hang {
    const char* fault;
    const char* who;  ///< the reason's beginning
    const char* says; ///< further on
};

std::ostream& operator<<(std::ostream& out, const Hang& hang) {
    return out << hang.fault;
}

class HangsAtTheEnd : public Faults, public ::testing::WithParamInterface<Hang> {};

// It runs or sleeps, so that nothing about its process looks wrong.
TEST_P(HangsAtTheEnd, IsGivenUpAndNamedWithThePhase) {
    together_timeout_ = 3s;
    const LaunchResult result = launch(3, "end", GetParam().fault);
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    EXPECT_EQ(result.reason.rfind(GetParam().who, 0), 0u) << result.reason;
    EXPECT_NE(result.reason.find(GetParam().says), std::string::npos) << result.reason;
    EXPECT_TRUE(result.killed);
    EXPECT_LT(took_, 30s);
}

// In MPI_Finalize() all wait for one, and nobody knows for which.
INSTANTIATE_TEST_SUITE_P(
    Rank1, HangsAtTheEnd,
    ::testing::Values(Hang{"hang before the last", "rank 0 waited",
                           "'closing the world' for rank 1"},
                      Hang{"hang last", "ranks 0 1 2 did not come to an end in time",
                           "while closing, in MPI_Finalize"},
                      Hang{"hang behind the last", "rank 1 (pid ", "after closing"},
                      Hang{"hang at the very last", "rank 1 (pid ",
                           "reported the end of its work, but the process did not end"}),
    [](const auto& hang) {
        std::string name = hang.param.fault;
        std::replace(name.begin(), name.end(), ' ', '_');
        return name;
    });

// Nobody watches the ranks but themselves.
TEST_F(Faults, ARankThatStopsOnItsWayOutIsNamedUnderAnOwnMpirun) {
    for (const auto& [name, value] : mpirun_environment())
        ::setenv(name.c_str(), value.c_str(), 0);
    const std::string told = folder_ + "/told";
    const auto start = SteadyClock::now();
    const int status = std::system(("exec timeout 60 mpirun --bind-to none -n 3 " + own_path() +
                                    " --rank end 'stop last' " + folder_ + " 2>" + told + " >&2")
                                       .c_str());
    EXPECT_LT(SteadyClock::now() - start, 30s);
    EXPECT_EQ(WEXITSTATUS(status), 4);
    std::ifstream file(told);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    EXPECT_NE(text.find("did not end within 3000 ms while closing, in MPI_Finalize: rank 1 (pid "),
              std::string::npos)
        << text;
    EXPECT_NE(text.find(") is stopped"), std::string::npos) << text;
}

// The others wait in there for it.
TEST_F(Faults, ARankThatDiesWhileMpiStartsIsNoticed) {
    const LaunchResult result = launch(3, "MPI", "none");
    EXPECT_EQ(result.exit_code, 4);
    // mpirun may have ended the others by the time that it is noticed.
    EXPECT_NE(result.reason.find("ended while MPI was starting"), std::string::npos)
        << result.reason;
    EXPECT_NE(result.reason.find('1'), std::string::npos) << result.reason;
    EXPECT_LT(took_, 30s);
}

TEST_F(Faults, EveryRankKilledIsALoss) {
    const LaunchResult result = launch(1, "message", "kill");
    EXPECT_EQ(result.exit_code, 4);
    EXPECT_NE(result.reason.find("rank 0"), std::string::npos) << result.reason;
    EXPECT_NE(result.reason.find("ended in step 7 without saying why"), std::string::npos)
        << result.reason;
}

TEST(Launch, SaysWhatCannotBeStarted) {
    LaunchOptions options;
    options.command = {own_path()};
    options.mpirun = "no-such-mpirun";
    try {
        launch_ranks(options);
        FAIL() << "nothing was thrown";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(error.message().find("no-such-mpirun"), std::string::npos);
    }
    options.mpirun = "false";
    try {
        launch_ranks(options);
        FAIL() << "nothing was thrown";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Mpi);
    }
    options.ranks = 0;
    EXPECT_THROW(launch_ranks(options), Error);
}

TEST(Launch, ThisProcessWasNotLaunched) {
    EXPECT_FALSE(is_launched());
    EXPECT_EQ(launched_rank(), -1);
    ::setenv("OMPI_COMM_WORLD_RANK", "3", 1);
    ::setenv("OMPI_COMM_WORLD_SIZE", "5", 1);
    EXPECT_TRUE(is_launched());
    EXPECT_EQ(launched_rank(), 3);
    EXPECT_EQ(launched_size(), 5);
    ::unsetenv("OMPI_COMM_WORLD_RANK");
    ::unsetenv("OMPI_COMM_WORLD_SIZE");
}

} // namespace
} // namespace bellows

// In place of the library's, which they call.
extern "C" int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
    if (bellows::dies_in_mpi)
        ::raise(SIGKILL);
    return PMPI_Init_thread(argc, argv, required, provided);
}

extern "C" int MPI_Finalize() {
    if (bellows::last_signal != 0)
        ::raise(bellows::last_signal);
    if (bellows::hangs_last)
        bellows::hang();
    return PMPI_Finalize();
}

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "--rank")
        return bellows::run_rank(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
