// SPDX-License-Identifier: MIT
// A rank that is killed, a command that is told to end, a disk that is full for a while.
#include "e2e/runs.hpp"

#include <bellows/checkpoint/checkpoint.hpp>

#include <algorithm>
#include <csignal>
#include <ostream>

#include <sys/resource.h>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;

struct Victim {
    const char* name;
    Flags flags;
    int rank;
};

std::ostream& operator<<(std::ostream& out, const Victim& victim) {
    return out << victim.name;
}

std::size_t lines_of(const fs::path& run) {
    const std::string text = bellows::content_of(run / "metrics.jsonl");
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

bool no_temporary_below(const fs::path& run) {
    for (const auto& entry : fs::directory_iterator(run / "checkpoints"))
        if (entry.path().filename().string().front() == '.')
            return false;
    return true;
}

class KilledRank : public testing::TestWithParam<Victim> {};

} // namespace

TEST_P(KilledRank, EndsTheCommandAndIsNamed) {
    const Workspace workspace;
    Flags flags = GetParam().flags;
    flags.insert(flags.end(), {"--steps", "100000", "--checkpoint-every", "2"});
    const fs::path run = workspace.path() / "run";
    Command command = workspace.start(workspace.train_arguments("run", flags));
    ASSERT_TRUE(wait_until(command, [&] { return lines_of(run) >= 3; })) << command.errors();
    const pid_t victim = command.rank_process(GetParam().rank);
    ASSERT_GT(victim, 0);
    const auto killed = Clock::now();
    ASSERT_EQ(::kill(victim, SIGKILL), 0);
    const Finished finished = command.wait(std::chrono::seconds(60));
    const double seconds = std::chrono::duration<double>(Clock::now() - killed).count();
    EXPECT_EQ(finished.exit_code, 4) << finished.errors;
    EXPECT_LT(seconds, 30.0);
    const std::string name = "rank " + std::to_string(GetParam().rank);
    // A survivor saw it as an error of its own and said so before it ended.
    EXPECT_NE(finished.errors.find(name + " (pid " + std::to_string(victim)), std::string::npos)
        << finished.errors;
    const auto first = finished.errors.find("bellows: ");
    EXPECT_EQ(finished.errors.find("bellows: ", first + 1), std::string::npos)
        << "told more than once: " << finished.errors;
    // What was saved serves: the run goes on as if nothing had been.
    const bellows::Checkpoint saved = bellows::Checkpoint::open(run);
    EXPECT_NO_THROW(saved.verify());
    const std::string steps = std::to_string(saved.state().step + 2);
    const Finished resumed =
        workspace.bellows({"train", "--resume", run.string(), "--steps", steps});
    EXPECT_EQ(resumed.exit_code, 0) << resumed.errors;
    EXPECT_EQ(std::to_string(steps_of(run).back().step), steps);
    EXPECT_TRUE(no_temporary_below(run));
}

INSTANTIATE_TEST_SUITE_P(
    Of, KilledRank,
    testing::Values(
        Victim{"first_of_2", {"--ranks", "2"}, 0},
        Victim{"last_of_2_stages", {"--ranks", "4", "--pp", "2", "--micro-batches", "2"}, 3},
        Victim{"dualpipe",
               {"--ranks", "2", "--pp", "2", "--micro-batches", "4", "--pipeline", "dualpipe"},
               1}),
    [](const auto& victim) { return std::string(victim.param.name); });

// Slow is not lost: a wait that takes longer than its limit says so, and what to do.
TEST(SlowStep, IsNotALostPeer) {
    const Workspace workspace;
    const fs::path config =
        workspace.edited_config("batch = 8", "step_timeout = 0.002\nbatch = 256");
    for (const char* ranks : {"1", "2"}) {
        Flags arguments = workspace.train_arguments("slow", {"--ranks", ranks, "--steps", "1"});
        std::replace(arguments.begin(), arguments.end(), workspace.config().string(),
                     config.string());
        expect_one_line(workspace.bellows(arguments), 3,
                        "raise step_timeout in [train], now 0.002 seconds");
    }
}

// With weight decay this rate makes the weights a hundred times larger in every step.
TEST(Divergence, EndsTheRunAndKeepsItsLastWeights) {
    const Workspace workspace;
    const fs::path config = workspace.edited_config("lr = 3e-3", "lr = 1000.0");
    Flags arguments = workspace.train_arguments("diverged", {"--ranks", "1", "--steps", "60"});
    std::replace(arguments.begin(), arguments.end(), workspace.config().string(), config.string());
    const Finished finished = workspace.bellows(arguments);
    EXPECT_EQ(finished.exit_code, 7) << finished.errors;
    EXPECT_NE(finished.errors.find("steps before is not finite"), std::string::npos)
        << finished.errors;
    EXPECT_NE((finished.out + finished.errors).find("the weights stay as they are"),
              std::string::npos)
        << finished.out << finished.errors;
}

namespace {

constexpr const char* kWarning = "warning: no checkpoint at step";

/// From now on the process can write no file beyond `bytes`: what a full disk looks like to it.
void limit_files(pid_t process, rlim_t bytes) {
    rlimit limit{};
    ASSERT_EQ(::prlimit(process, RLIMIT_FSIZE, nullptr, &limit), 0);
    limit.rlim_cur = bytes;
    ASSERT_EQ(::prlimit(process, RLIMIT_FSIZE, &limit, nullptr), 0);
}

struct FullDisk {
    const char* name;
    Flags flags;
    int rank; ///< whose disk it is; -1: a command without ranks
};

std::ostream& operator<<(std::ostream& out, const FullDisk& disk) {
    return out << disk.name;
}

class FullDiskAtACheckpoint : public testing::TestWithParam<FullDisk> {};

} // namespace

// Full to the end: rank 0 can write nothing more. The command says so, and what was saved serves.
TEST(FullDisk, ToTheEndLeavesThePreviousCheckpoint) {
    const Workspace workspace;
    const fs::path run = workspace.path() / "run";
    Command command = workspace.start(workspace.train_arguments(
        "run", {"--ranks", "2", "--steps", "45", "--checkpoint-every", "10"}));
    ASSERT_TRUE(wait_until(command, [&] { return bellows::latest_checkpoint(run).has_value(); }))
        << command.errors();
    const pid_t writer = command.rank_process(0);
    ASSERT_GT(writer, 0);
    limit_files(writer, 1);
    const Finished finished = command.wait();
    expect_one_line(finished, 6, "step 45 could not be saved");
    EXPECT_NE(finished.out.find(kWarning), std::string::npos) << finished.out;
    EXPECT_NE(finished.out.find("metrics.jsonl"), std::string::npos) << finished.out;
    const bellows::Checkpoint previous = bellows::Checkpoint::open(run);
    EXPECT_LT(previous.state().step, 45u);
    EXPECT_NO_THROW(previous.verify());
    const Finished resumed =
        workspace.bellows({"train", "--resume", run.string(), "--steps", "47"});
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    const auto steps = printed_steps(run);
    const auto whole = printed_steps(workspace.train("whole", {"--ranks", "2", "--steps", "47"}));
    // Lines that found no room before the checkpoint are missing; those after it are all there.
    const std::size_t again = 47 - previous.state().step;
    ASSERT_GE(steps.size(), again);
    for (std::size_t i = 1; i <= again; ++i)
        EXPECT_EQ(steps[steps.size() - i], whole[whole.size() - i]);
}

// The new checkpoint is there; that an old one stays is another matter, and the next one mends it.
TEST(OlderCheckpoints, ThatCannotBeRemovedAreAWarningOfTheirOwn) {
    constexpr const char* kStays = "warning: older checkpoints could not be removed";
    const Workspace workspace;
    const fs::path run = workspace.path() / "run";
    Command command = workspace.start(workspace.train_arguments(
        "run", {"--ranks", "1", "--steps", "80", "--checkpoint-every", "1"}));
    const auto warned = [&] {
        // The name under which a checkpoint is removed: a folder cannot take that of a file.
        const auto newest = bellows::latest_checkpoint(run);
        if (newest)
            for (const auto& entry : fs::directory_iterator(newest->parent_path()))
                if (entry.path().filename().string().starts_with("step-"))
                    std::ofstream(entry.path().parent_path() /
                                  ("." + entry.path().filename().string() + ".tmp"));
        return command.out().find(kStays) != std::string::npos;
    };
    ASSERT_TRUE(wait_until(command, warned)) << command.out() << command.errors();
    const Finished finished = command.wait();
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_EQ(finished.out.find(kWarning), std::string::npos) << finished.out;
    EXPECT_EQ(bellows::Checkpoint::open(run).state().step, 80u);
    EXPECT_EQ(std::distance(fs::directory_iterator(run / "checkpoints"), {}), 2)
        << "the checkpoints after the warning removed them";
}

TEST_P(FullDiskAtACheckpoint, IsAWarningAndTheRunGoesOn) {
    constexpr rlim_t kTooSmallForAShard = 60'000; // metrics.jsonl stays below that
    const Workspace workspace;
    Flags flags = GetParam().flags;
    flags.insert(flags.end(), {"--steps", "70", "--checkpoint-every", "10"});
    const fs::path run = workspace.path() / "run";
    Command command = workspace.start(workspace.train_arguments("run", flags));
    const auto saved = [&] { return bellows::latest_checkpoint(run).has_value(); };
    ASSERT_TRUE(wait_until(command, saved)) << command.errors();
    const pid_t writer =
        GetParam().rank < 0 ? command.process() : command.rank_process(GetParam().rank);
    ASSERT_GT(writer, 0);
    limit_files(writer, kTooSmallForAShard);
    const auto warned = [&] { return command.out().find(kWarning) != std::string::npos; };
    ASSERT_TRUE(wait_until(command, warned)) << command.out() << command.errors();
    // The previous one is there while the disk is still full.
    ::kill(writer, SIGSTOP);
    const auto previous = bellows::latest_checkpoint(run);
    ASSERT_TRUE(previous.has_value());
    EXPECT_NO_THROW(bellows::Checkpoint::open(*previous).verify()) << *previous;
    limit_files(writer, RLIM_INFINITY);
    ::kill(writer, SIGCONT);
    const Finished finished = command.wait();
    EXPECT_EQ(finished.exit_code, 0) << finished.errors;
    EXPECT_EQ(lines_of(run), 70u);
    EXPECT_EQ(bellows::Checkpoint::open(run).state().step, 70u) << "the disk had room again";
    EXPECT_TRUE(no_temporary_below(run));
}

INSTANTIATE_TEST_SUITE_P(Of, FullDiskAtACheckpoint,
                         testing::Values(FullDisk{"the_only_rank", {"--ranks", "1"}, -1},
                                         FullDisk{"the_second_of_2", {"--ranks", "2"}, 1}),
                         [](const auto& disk) { return std::string(disk.param.name); });
