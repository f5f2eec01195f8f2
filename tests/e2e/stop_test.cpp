// SPDX-License-Identifier: MIT
// A training run that is asked to stop: it saves its work, and goes on later as if nothing had
// been.
#include "e2e/runs.hpp"

#include <bellows/checkpoint/checkpoint.hpp>

#include <algorithm>
#include <csignal>
#include <ostream>
#include <thread>

using namespace bellows::e2e;
namespace fs = std::filesystem;

namespace {

constexpr std::chrono::seconds kLimit{60};
constexpr int kStopped = 5;
constexpr const char* kHeard = "bellows: the run writes a checkpoint after this step and ends; a "
                               "second signal ends it at once\n";

std::size_t lines_of(const fs::path& run) {
    const std::string text = bellows::content_of(run / "metrics.jsonl");
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

/// Who gets which signal.
struct Stop {
    const char* name;
    Flags flags;
    int number;
    bool own_mpirun = false; ///< the user's, on two ranks; the signal goes to the second
    bool ranks_too = false;  ///< the signal goes to the launcher and, as by killall, to two ranks
};

std::ostream& operator<<(std::ostream& out, const Stop& stop) {
    return out << stop.name;
}

class StoppedRun : public testing::TestWithParam<Stop> {
protected:
    /// A run that would take very long.
    Command start() const {
        Flags flags = GetParam().flags;
        flags.insert(flags.end(), {"--steps", "100000"});
        const Flags arguments = workspace_.train_arguments("run", flags);
        if (!GetParam().own_mpirun)
            return workspace_.start(arguments);
        Flags command = {mpirun(), "-n", "2", program()};
        command.insert(command.end(), arguments.begin(), arguments.end());
        return workspace_.start_command(command, for_mpirun());
    }

    Workspace workspace_;
    fs::path run_ = workspace_.path() / "run";
};

} // namespace

TEST_P(StoppedRun, HasACheckpointFromWhichItGoesOnWithTheSameBits) {
    Command command = start();
    ASSERT_TRUE(wait_until(command, [&] { return lines_of(run_) >= 2; })) << command.errors();
    const pid_t target = GetParam().own_mpirun ? command.rank_process(1) : command.process();
    ASSERT_GT(target, 0);
    if (GetParam().ranks_too) {
        for (const int rank : {0, 1})
            ASSERT_EQ(::kill(command.rank_process(rank), GetParam().number), 0);
    }
    ASSERT_EQ(::kill(target, GetParam().number), 0);
    const Finished finished = command.wait(kLimit);
    EXPECT_NE(finished.out.find("go on with: bellows train --resume"), std::string::npos)
        << finished.out;
    if (!GetParam().own_mpirun) { // whose mpirun says what it likes
        EXPECT_EQ(finished.exit_code, kStopped) << finished.errors;
        EXPECT_EQ(finished.errors, kHeard);
    }

    const bellows::Checkpoint saved = bellows::Checkpoint::open(run_);
    EXPECT_NO_THROW(saved.verify());
    EXPECT_EQ(saved.state().step, lines_of(run_)) << "the step that ran is in it";
    const std::string steps = std::to_string(saved.state().step + 2);
    const Finished resumed =
        workspace_.bellows({"train", "--resume", run_.string(), "--steps", steps});
    ASSERT_EQ(resumed.exit_code, 0) << resumed.errors;
    Flags flags = GetParam().flags;
    if (GetParam().own_mpirun)
        flags.insert(flags.end(), {"--ranks", "2"});
    flags.insert(flags.end(), {"--steps", steps});
    const fs::path whole = workspace_.train("whole", flags);
    EXPECT_EQ(printed_steps(run_), printed_steps(whole));
    EXPECT_TRUE(same_tensors(run_, whole));
}

INSTANTIATE_TEST_SUITE_P(
    By, StoppedRun,
    testing::Values(
        Stop{"int_to_one_rank", {"--ranks", "1"}, SIGINT},
        Stop{"term_to_the_launcher_of_2", {"--ranks", "2"}, SIGTERM},
        Stop{"int_in_a_pipeline", {"--ranks", "2", "--pp", "2", "--micro-batches", "4"}, SIGINT},
        Stop{"int_to_launcher_and_ranks", {"--ranks", "2"}, SIGINT, false, true},
        Stop{"usr1_to_a_rank_of_an_own_mpirun", {}, SIGUSR1, true}),
    [](const auto& stop) { return std::string(stop.param.name); });

// A rank that does not move cannot end its step.
TEST(SecondSignal, EndsTheRunAtOnce) {
    const Workspace workspace;
    const fs::path run = workspace.path() / "run";
    Command command =
        workspace.start(workspace.train_arguments("run", {"--ranks", "2", "--steps", "100000"}));
    ASSERT_TRUE(wait_until(command, [&] { return lines_of(run) >= 1; })) << command.errors();
    const pid_t stuck = command.rank_process(1);
    ASSERT_GT(stuck, 0);
    ASSERT_EQ(::kill(stuck, SIGSTOP), 0);
    ASSERT_EQ(::kill(command.process(), SIGINT), 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(800)); // two at once are one
    ASSERT_EQ(::kill(command.process(), SIGINT), 0);
    const Finished finished = command.wait(std::chrono::seconds(30));
    EXPECT_EQ(finished.exit_code, 128 + SIGINT) << finished.errors;
}

TEST(RunFolder, IsOneRunsAtATime) {
    const Workspace workspace;
    const fs::path run = workspace.path() / "run";
    const auto arguments = [&](const char* steps) {
        return workspace.train_arguments("run", {"--ranks", "2", "--steps", steps});
    };
    Command command = workspace.start(arguments("100000"));
    ASSERT_TRUE(wait_until(command, [&] { return lines_of(run) >= 1; })) << command.errors();
    const std::string holder = std::to_string(command.rank_process(0));
    for (const Environment& environment :
         {Environment{}, Environment{{"BELLOWS_INPUT_CHECKED", "1"}}}) // a user may export anything
        expect_one_line(workspace.bellows(arguments("1"), environment), 2,
                        "another run (process " + holder + ") writes to ");
    ASSERT_EQ(::kill(command.process(), SIGTERM), 0);
    EXPECT_EQ(command.wait(kLimit).exit_code, kStopped);
    EXPECT_EQ(bellows::Checkpoint::open(run).state().step, lines_of(run));
}

TEST(Checkpoints, AreWrittenByTimeUnlessByStep) {
    const Workspace workspace;
    const fs::path config =
        workspace.edited_config("batch = 8", "checkpoint_minutes = 0.002\nbatch = 8");
    Flags arguments = workspace.train_arguments("run", {"--ranks", "2", "--steps", "100000"});
    std::replace(arguments.begin(), arguments.end(), workspace.config().string(), config.string());
    const fs::path run = workspace.path() / "run";
    Command command = workspace.start(arguments);
    const auto newest = [&] { return bellows::latest_checkpoint(run); };
    ASSERT_TRUE(wait_until(command, [&] { return newest().has_value(); })) << command.errors();
    const fs::path first = *newest();
    EXPECT_TRUE(wait_until(command, [&] { return newest() != first; })) << command.errors();
    ASSERT_EQ(::kill(command.process(), SIGTERM), 0);
    EXPECT_EQ(command.wait(kLimit).exit_code, kStopped);
}
