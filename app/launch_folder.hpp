// SPDX-License-Identifier: MIT
#pragma once

// The private folder through which launched ranks tell the launcher that they live and how they
// ended: `<rank>.start` holds the process id and its start time, `<rank>.exit` the exit code.

#include <filesystem>
#include <optional>
#include <vector>

#include <sys/types.h>

namespace bellows {

inline constexpr const char* kLaunchFolderVariable = "BELLOWS_LAUNCH_FOLDER";

/// A process, told apart from a later one with the same id by when it started.
struct ProcessId {
    pid_t pid = 0;
    unsigned long long start_time = 0; ///< in clock ticks since boot, from /proc

    static ProcessId self();
    /// False once it has ended, also if nobody has collected it yet.
    bool is_alive() const;
};

struct RankReport {
    std::optional<ProcessId> process; ///< once the rank has begun
    std::optional<int> exit_code;     ///< once it has ended by itself
    bool is_lost() const { return process && !exit_code && !process->is_alive(); }
};

/// Each throws Error{Io}.
void report_start(const std::filesystem::path& folder, int rank);
void report_exit(const std::filesystem::path& folder, int rank, int exit_code);
/// Never throws for files that are not there (yet).
std::vector<RankReport> read_reports(const std::filesystem::path& folder, int ranks);

} // namespace bellows
