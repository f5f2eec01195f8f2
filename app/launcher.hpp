// SPDX-License-Identifier: MIT
#pragma once

// `--ranks N` without mpirun: one process starts mpirun on this host with what OpenMPI needs,
// passes output and signals through, and turns what became of the ranks into one exit code. The
// ranks tell it by small files in a private folder, because mpirun answers 0 when it was told to
// survive a lost rank. Used by the launching process before it starts any thread, and by every
// rank's main().

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

/// True under mpirun, srun or another MPI launcher: this process is one rank of several.
bool is_started_by_mpi();
/// The number of ranks that the launcher's environment tells, if it does.
std::optional<int> ranks_from_environment();

struct LauncherOptions {
    int ranks = 1;
    std::filesystem::path program;      ///< what every rank executes; empty: this program
    std::vector<std::string> arguments; ///< without the program's name
    /// All ranks have begun by then; mpirun does not always end when it cannot start them.
    std::chrono::milliseconds start_limit{120'000};
    /// After the first rank was lost or failed, the others have this long to end by themselves.
    std::chrono::milliseconds grace{22'000};
    /// After that, or after a signal to us: between asking mpirun to end them and killing it.
    std::chrono::milliseconds kill_after{4'000};
};

struct LauncherResult {
    int exit_code = 0;   ///< as ranks see it (0 … 4), or 128 + the signal that we were ended with
    std::string message; ///< one line if a rank was lost or mpirun failed, else empty
};

/// Runs the ranks to their end. A rank that vanishes without its exit code was lost: exit code 4,
/// and the message names it. Else the first failing rank's code, 4 only if no rank has another.
/// Throws Error{InvalidArgument} for ranks < 1, Error{Unsupported} if there is no mpirun,
/// Error{Io}.
LauncherResult run_ranks(const LauncherOptions& options);

/// In a rank's main(): tells a launcher, if there is one, that this rank lives and how it ended.
/// Does nothing in a process that run_ranks() did not start.
class LaunchedRank {
public:
    LaunchedRank();
    LaunchedRank(const LaunchedRank&) = delete;
    LaunchedRank& operator=(const LaunchedRank&) = delete;

    /// To be called last, with the exit code; a rank that ends without it counts as lost.
    void finish(int exit_code) noexcept;

private:
    std::filesystem::path folder_; // empty: not launched
    int rank_ = 0;
};

} // namespace bellows
