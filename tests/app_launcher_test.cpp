// SPDX-License-Identifier: MIT
// run_ranks() with this very program as its ranks: main() takes a role if it is given one.
#include "app/launcher.hpp"

#include "app_test_util.hpp"

#include <charconv>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

using namespace bellows;
using namespace std::chrono_literals;
namespace fs = std::filesystem;

namespace {

constexpr auto kStuck = 60s; // a rank that does not see its peer go; far beyond the tests' limits

int as_rank(const std::string& role, const std::string& argument) {
    LaunchedRank launched;
    const char* text = std::getenv("OMPI_COMM_WORLD_RANK");
    const int rank = text != nullptr ? std::atoi(text) : -1;
    int code = 0;
    if (role == "write") { // leaves a file that says who it was
        std::ofstream(fs::path(argument) / std::to_string(rank)) << std::getenv("BELLOWS_TERMINAL");
    } else if (role == "codes") { // argument: one digit per rank
        code = argument.at(static_cast<std::size_t>(rank)) - '0';
    } else if (role == "killed" || role == "killed-and-stuck") {
        if (rank == 1) {
            std::this_thread::sleep_for(200ms); // all have begun
            ::raise(SIGKILL);
        }
        std::this_thread::sleep_for(role == "killed" ? std::chrono::seconds(1) : kStuck);
        code = 4;
    } else if (role == "fails-and-stuck") {
        std::this_thread::sleep_for(rank == 1 ? std::chrono::seconds(0) : kStuck);
        code = 2;
    } else if (role == "signal") { // argument: the launcher's process id
        std::this_thread::sleep_for(500ms);
        if (rank == 0) {
            ::kill(std::atoi(argument.c_str()), SIGTERM);
        }
        std::this_thread::sleep_for(kStuck);
    } else if (role == "signal-and-deaf") {
        ::signal(SIGTERM, SIG_IGN);
        return as_rank("signal", argument);
    } else if (role == "stderr") {
        std::fputs("[one] two\n[vm:1] PMIX ERROR: x\n[no end", stderr);
    }
    launched.finish(code);
    return code;
}

LauncherResult launch(int ranks, const std::string& role, const std::string& argument = "-") {
    LauncherOptions options;
    options.ranks = ranks;
    options.arguments = {"--as-rank", role, argument};
    options.grace = 2s;
    options.kill_after = 1s;
    return run_ranks(options);
}

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

} // namespace

TEST(Launcher, StartsEveryRankOnce) {
    TemporaryFolder folder;
    const LauncherResult result = launch(3, "write", folder.path().string());
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_EQ(result.message, "");
    for (const char* rank : {"0", "1", "2"}) {
        EXPECT_EQ(content_of(folder.path() / rank).empty(), false) << rank;
    }
    EXPECT_FALSE(fs::exists(folder.path() / "3"));
    EXPECT_FALSE(fs::exists(folder.path() / "-1"));
}

TEST(Launcher, TheFirstFailingRankGivesTheCode) {
    EXPECT_EQ(launch(2, "codes", "00").exit_code, 0);
    EXPECT_EQ(launch(3, "codes", "010").exit_code, 1);
    EXPECT_EQ(launch(3, "codes", "023").exit_code, 2);
    EXPECT_EQ(launch(2, "codes", "04").exit_code, 4);
    EXPECT_EQ(launch(3, "codes", "442").exit_code, 2) << "4 is what the others saw";
    EXPECT_EQ(launch(2, "fails-and-stuck").exit_code, 2) << "ranks that we end are not lost";
}

TEST(Launcher, AKilledRankIsNamed) {
    const auto start = std::chrono::steady_clock::now();
    const LauncherResult result = launch(3, "killed");
    EXPECT_EQ(result.exit_code, 4);
    EXPECT_NE(result.message.find("rank 1 (process "), std::string::npos) << result.message;
    EXPECT_EQ(result.message.find("rank 0"), std::string::npos) << result.message;
    EXPECT_EQ(result.message.find("rank 2"), std::string::npos) << result.message;
    EXPECT_LT(seconds_since(start), 15);
}

TEST(Launcher, RanksThatHangAfterALossAreEnded) {
    const auto start = std::chrono::steady_clock::now();
    const LauncherResult result = launch(3, "killed-and-stuck");
    EXPECT_EQ(result.exit_code, 4);
    EXPECT_NE(result.message.find("rank 1"), std::string::npos) << result.message;
    EXPECT_EQ(result.message.find("rank 0"), std::string::npos) << "we ended it, it was not lost";
    EXPECT_LT(seconds_since(start), 20) << "grace 2 s, then 1 s until force";
}

TEST(Launcher, ASignalEndsAllRanks) {
    for (const char* role : {"signal", "signal-and-deaf"}) {
        const auto start = std::chrono::steady_clock::now();
        const LauncherResult result = launch(2, role, std::to_string(::getpid()));
        EXPECT_EQ(result.exit_code, 128 + SIGTERM);
        EXPECT_LT(seconds_since(start), 15);
    }
}

TEST(Launcher, PassesErrorsOnWithoutInternalOnes) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(launch(1, "stderr").exit_code, 0);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find("[one] two\n"), std::string::npos) << text;
    EXPECT_NE(text.find("[no end"), std::string::npos) << text;
    EXPECT_EQ(text.find("PMIX"), std::string::npos) << text;
}

TEST(Launcher, RanksThatNeverBeginAreEnded) {
    LauncherOptions options;
    options.ranks = 2;
    options.program = "/bin/sleep";
    options.arguments = {"60"};
    options.start_limit = 1s;
    options.kill_after = 1s;
    const auto start = std::chrono::steady_clock::now();
    const LauncherResult result = run_ranks(options);
    EXPECT_EQ(result.exit_code, 3);
    EXPECT_NE(result.message.find("mpirun did not start"), std::string::npos) << result.message;
    EXPECT_LT(seconds_since(start), 15);
}

TEST(Launcher, RefusesWhatItCannotStart) {
    LauncherOptions options;
    options.ranks = 0;
    EXPECT_BELLOWS_ERROR(run_ranks(options), InvalidArgument, "0 ranks");
    options.ranks = 2;
    options.program = "/no/such/program";
    EXPECT_BELLOWS_ERROR(run_ranks(options), Io, "/no/such/program");

    const std::string path = std::getenv("PATH");
    options.program.clear();
    ::setenv("PATH", "/nowhere", 1);
    EXPECT_BELLOWS_ERROR(run_ranks(options), Unsupported, "mpirun");
    ::setenv("PATH", path.c_str(), 1);
}

TEST(Launcher, KnowsWhenAnotherOneStartedUs) {
    EXPECT_FALSE(is_started_by_mpi());
    EXPECT_EQ(ranks_from_environment(), std::nullopt);
    ::setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
    EXPECT_TRUE(is_started_by_mpi());
    EXPECT_EQ(ranks_from_environment(), 4);
    ::unsetenv("OMPI_COMM_WORLD_SIZE");
    ::setenv("SLURM_STEP_NUM_TASKS", "8", 1); // as in a batch script
    EXPECT_FALSE(is_started_by_mpi());
    ::setenv("SLURM_STEP_ID", "0", 1);
    EXPECT_TRUE(is_started_by_mpi());
    EXPECT_EQ(ranks_from_environment(), 8);
    ::unsetenv("SLURM_STEP_ID");
    ::unsetenv("SLURM_STEP_NUM_TASKS");
}

int main(int argc, char** argv) {
    if (argc == 4 && std::strcmp(argv[1], "--as-rank") == 0) {
        return as_rank(argv[2], argv[3]);
    }
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
