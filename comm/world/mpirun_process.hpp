// SPDX-License-Identifier: MIT
#pragma once

#include "launch_io.hpp"

#include <bellows/comm/launch.hpp>

#include <csignal>
#include <string>
#include <sys/types.h>
#include <vector>

namespace bellows {

/// Starts mpirun with the ranks of `options` in a process group of its own; it ends with this
/// process. environment: NAME=value of everything that it sees. Its standard error goes to the pipe
/// `errors`, of which this process keeps the end for reading, without blocking. Throws as
/// launch_ranks() does.
pid_t start_mpirun(const LaunchOptions& options, std::vector<std::string> environment,
                   const sigset_t& signal_mask, Pipe& errors);

} // namespace bellows
