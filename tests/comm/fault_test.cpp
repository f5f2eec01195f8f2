// SPDX-License-Identifier: MIT

// What happens when a rank is killed, stopped, throws or leaves: this program launches itself
// through mpirun, one rank does it, and the others must hear of it in seconds, whatever they wait
// in. Each survivor writes down what it saw; the launcher must return the exit code that a user
// would see.

#include <bellows/comm/host_collectives.hpp>
#include <bellows/comm/launch.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#ifdef __SANITIZE_ADDRESS__
// Ranks here end without MPI_Finalize, as survivors must, and keep what MPI holds.
extern "C" const char* __asan_default_options() {
    return "detect_leaks=0";
}
#endif

namespace bellows {
namespace {

using namespace std::chrono_literals;
using SteadyClock = std::chrono::steady_clock;

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

int run_rank(int argc, char** argv) {
    const std::string phase = argv[2], fault = argv[3], folder = argv[4];
    if (fault == "usage" && launched_rank() == 1) {
        report_exit(1, 2, "unknown option");
        return 2;
    }
    int rank = -1, exit_code = 0;
    std::string reason;
    SteadyClock::time_point start;
    try {
        World world = World::init(argc, argv);
        rank = world.rank();
        const auto transport = open_transport(world);
        HostCollectives collectives(world, Group::all(world.size()), 60s);
        const int culprit = world.size() > 1 ? 1 : 0;
        world.control().barrier(60s);
        start = SteadyClock::now();
        if (fault != "none") {
            if (rank == culprit) {
                std::ofstream(folder + "/culprit") << ::getpid();
                std::this_thread::sleep_for(100ms); // the others are well inside their waits
                misbehave(fault, world);
            }
            wait_for_the_culprit(phase, world, *transport, collectives, culprit);
        }
        world.close();
    } catch (const Error& error) {
        exit_code = exit_code_of(error);
        reason = error.message();
        const auto waited =
            std::chrono::duration_cast<std::chrono::milliseconds>(SteadyClock::now() - start);
        std::ofstream(folder + "/rank" + std::to_string(rank))
            << to_string(error.code()) << ' ' << error.rank() << ' ' << waited.count() << ' '
            << error.message() << '\n';
    } catch (const std::exception& error) {
        exit_code = 1;
        reason = error.what();
    }
    report_exit(rank, exit_code, reason);
    return exit_code;
}

// --- the tests -----------------------------------------------------------------------------------

struct Seen {
    std::string code;
    int rank = -2;
    long milliseconds = -1;
    std::string message;
};

// A process that has ended may stay as a zombie until its new parent looks.
bool is_alive(pid_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name, state;
    file >> number >> name >> state;
    return file && state != "Z" && state != "X";
}

class Faults : public ::testing::Test {
protected:
    void SetUp() override {
        std::string name =
            (std::filesystem::temp_directory_path() / "bellows-fault-XXXXXX").string();
        ASSERT_NE(::mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }

    LaunchResult launch(int ranks, const std::string& phase, const std::string& fault) {
        LaunchOptions options;
        options.ranks = ranks;
        options.command = {own_path(), "--rank", phase, fault, folder_};
        options.grace = 3s;
        const auto start = SteadyClock::now();
        const LaunchResult result = launch_ranks(options);
        took_ = SteadyClock::now() - start;
        return result;
    }

    Seen seen(int rank) const {
        Seen result;
        std::ifstream file(folder_ + "/rank" + std::to_string(rank));
        file >> result.code >> result.rank >> result.milliseconds;
        std::getline(file >> std::ws, result.message);
        return result;
    }

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
        }
    }

    std::string folder_;
    SteadyClock::duration took_{};
};

TEST_F(Faults, AGoodRunReturnsZero) {
    const LaunchResult result = launch(3, "none", "none");
    EXPECT_EQ(result.exit_code, 0) << result.reason;
    EXPECT_FALSE(result.killed);
}

class KilledWhile : public Faults, public ::testing::WithParamInterface<const char*> {};

TEST_P(KilledWhile, TheOthersHearOfItAtOnce) {
    const LaunchResult result = launch(4, GetParam(), "kill");
    EXPECT_EQ(result.exit_code, 4) << result.reason;
    EXPECT_NE(result.reason.find("rank 1"), std::string::npos) << result.reason;
    EXPECT_FALSE(result.killed) << "every survivor must end by itself";
    expect_survivors_lost_rank_1(4, 5000, "died");
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
        EXPECT_EQ(seen(rank).message, "rank 1: hidden size 7 does not divide");
    }
}

TEST_F(Faults, ARankThatNeverJoinsDoesNotHangTheOthers) {
    const LaunchResult result = launch(2, "message", "usage");
    EXPECT_EQ(result.exit_code, 2);
    EXPECT_EQ(result.rank, 1);
    EXPECT_EQ(result.reason, "unknown option");
    EXPECT_LT(took_, 30s);
}

TEST_F(Faults, EveryRankKilledIsALoss) {
    const LaunchResult result = launch(1, "message", "kill");
    EXPECT_EQ(result.exit_code, 4);
    EXPECT_NE(result.reason.find("rank 0"), std::string::npos) << result.reason;
}

TEST(Launch, SaysWhatCannotBeStarted) {
    LaunchOptions options;
    options.command = {own_path()};
    options.mpirun = "no-such-mpirun";
    try {
        launch_ranks(options);
        FAIL() << "nothing was thrown";
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Unsupported);
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

int main(int argc, char** argv) {
    if (argc == 5 && std::string(argv[1]) == "--rank")
        return bellows::run_rank(argc, argv);
    ::testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
