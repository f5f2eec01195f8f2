// SPDX-License-Identifier: MIT
#pragma once

// The mpirun process behind run_ranks(): its command line, its standard error, its end.

#include "app/file_io.hpp"
#include "app/launcher.hpp"

#include <csignal>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

namespace bellows {

/// mpirun and its arguments for ranks of this host: started as root too, more ranks than cores,
/// waiting ranks yield their core, a lost rank does not end the others.
std::vector<std::string> mpirun_command(const LauncherOptions& options,
                                        const std::filesystem::path& program);

class MpirunProcess {
public:
    /// Starts it in a process group of its own, with `signals` unblocked as given and the launch
    /// folder in its environment. Throws Error{Unsupported} if there is no mpirun.
    MpirunProcess(const LauncherOptions& options, const std::filesystem::path& folder,
                  const sigset_t& signals);
    MpirunProcess(const MpirunProcess&) = delete;
    MpirunProcess& operator=(const MpirunProcess&) = delete;
    /// Kills it if it still runs.
    ~MpirunProcess();

    void send(int signal) const;
    /// Its exit code (128 + signal if it was killed) once it has ended.
    std::optional<int> exit_code();

    /// Readable when pass_errors() has something to do; -1 after the end.
    int errors_fd() const noexcept { return errors_.get(); }
    /// Copies what came on its standard error to ours, without blocking. OpenMPI 4 reports each
    /// survived loss as an internal "PMIX ERROR"; those lines are left out.
    void pass_errors();

private:
    pid_t pid_ = -1;
    std::optional<int> exit_code_;
    FileHandle errors_;
    std::string held_; // the beginning of a line that may have to be left out
    bool at_line_start_ = true;
};

} // namespace bellows
