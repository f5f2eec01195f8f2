// SPDX-License-Identifier: MIT
#pragma once

// What /proc says of other processes of this user.

#include <sys/types.h>

#include <vector>

namespace bellows {

/// By a signal, not by a debugger.
bool is_stopped(pid_t process);
/// False also for one that has ended and waits to be collected.
bool is_alive(pid_t process);
/// Those that it has started and that are there now.
std::vector<pid_t> children_of(pid_t process);
/// Its rank as mpirun has told it, -1 if it has been told none.
int rank_of_process(pid_t process);

} // namespace bellows
