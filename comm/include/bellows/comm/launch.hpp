// SPDX-License-Identifier: MIT
#pragma once

// Starting the ranks of one host through mpirun, so that a lost rank does not take the others
// along, and learning how they ended. The parent calls launch_ranks() before it has a World; each
// rank calls report_exit() last. What OpenMPI 4 and 5 need for that is in mpirun_arguments() and
// mpirun_environment():
//  - `--enable-recovery`: survivors go on when a rank dies. mpirun 4 then returns 0 whatever
//  happened,
//    so ranks report their exit codes to the parent themselves, over a Unix socket.
//  - A stopped rank keeps mpirun waiting for ever; SIGTERM makes mpirun kill what is left, which
//  the
//    parent sends some seconds after the first bad report.

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows {

struct LaunchOptions {
    int ranks = 1;
    std::vector<std::string> command; ///< program and its arguments
    std::string mpirun = "mpirun";
    /// For all ranks to make their World; then the rest is ended.
    std::chrono::milliseconds startup_timeout{180'000};
    /// Between the first sign of a failure, be it a rank that ends without a report, and the end of
    /// the ranks that are still there.
    std::chrono::milliseconds grace{8'000};
    /// A rank that a signal has stopped (SIGSTOP) for so long counts as lost. While ranks work, the
    /// others' heartbeats notice it sooner; in MPI_Finalize() and behind it nobody else does.
    std::chrono::milliseconds stopped_timeout{20'000};
    /// For all ranks to end once the first has ended well, or to be there once the first is there.
    /// A phase with a limit of its own (begin_phase()) takes its time.
    std::chrono::milliseconds together_timeout{20'000};
    /// Once all ranks have started, the first SIGINT or SIGTERM to this process sends them this
    /// signal, and they end by themselves. A second one, at least half a second later, ends them.
    /// 0: the first one ends them.
    int stop_signal = 0;
    /// Called once, when that first signal has been passed on.
    std::function<void()> on_stop_asked{};
    /// A rank that has ended because of stop_signal reports this, which is no failure. 0: there is
    /// none.
    int stopped_exit_code = 0;
};

struct LaunchResult {
    /// 0 if every rank reported 0; else the first code of a failure that was reported; else
    /// stopped_exit_code if a rank reported that; else 4: a rank ended or never started without a
    /// report; 128 + n if signal n ended the launch.
    int exit_code = 0;
    int rank = -1;       ///< that exit_code comes from
    std::string reason;  ///< its report's text, or which ranks are missing
    bool killed = false; ///< ranks were left that had to be ended
};

/// Runs options.ranks processes of options.command and waits for them. Standard output is
/// inherited; standard error, too, less mpirun's own notes about lost processes. Standard input is
/// empty. mpirun and the ranks are a process group of their own: a terminal's Ctrl-C reaches this
/// process alone, which ends the ranks or asks them to end (stop_signal). What MPI keeps in shared
/// memory and in the temporary folder is in a folder of the launch that is removed at its end, or
/// by the next launch where this process is killed. Once all ranks have started, nobody can connect
/// to mpirun's ports. Throws Error{InvalidArgument} for no command, for no ranks and if mpirun
/// cannot be started, Error{Mpi} if it ended before any rank began.
LaunchResult launch_ranks(const LaunchOptions& options);

/// mpirun's arguments before the program.
std::vector<std::string> mpirun_arguments(int ranks);

/// Environment for mpirun, for OpenMPI 4 and 5: allowed to root, more ranks than cores, waits that
/// give the core away, messages through shared memory only, so that no rank listens to a network,
/// no memory access across processes (containers forbid it). Variables that the user has set stay
/// as they are.
std::vector<std::pair<std::string, std::string>> mpirun_environment();

/// Whether mpirun or srun started this process as one of several ranks or as the only one.
bool is_launched() noexcept;
/// Rank and number of ranks by the launcher's environment, usable before World::init(); -1 and 0 if
/// there is no launcher.
int launched_rank() noexcept;
int launched_size() noexcept;

/// Whether launch_ranks() started this process, which then learns of its end from report_exit().
bool has_launcher() noexcept;
/// Tells launch_ranks() in the parent, if there is one, how this rank ends; the last thing to do.
void report_exit(int rank, int exit_code, std::string_view reason = {}) noexcept;
/// Tells it that this process is a rank whose MPI is about to start (World::init() does): should it
/// die in there, that is noticed at once.
void report_alive(int rank) noexcept;
/// Tells it that this rank has its World (World::init() does).
void report_started(int rank) noexcept;
/// Tells it what this rank does from here on ("in step 12"), and how long that may take; limit 0:
/// any time. begin_phase() does.
void report_phase(int rank, std::string_view phase, std::chrono::milliseconds limit) noexcept;

} // namespace bellows
