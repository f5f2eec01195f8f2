// SPDX-License-Identifier: MIT
#pragma once

// mpirun reads from whoever connects to one of its TCP ports, and does nothing else until that one
// has spoken or left. On one host nobody but the ranks has to reach them.

#include <sys/types.h>

namespace bellows {

enum class Admit {
    ThisHost, ///< at ports of all interfaces, packets from this host alone; other ports as they are
    Nobody    ///< no new connection at any port
};

/// Puts a packet filter on what `process` listens at. Connections that stand remain. Does nothing
/// where the system does not let it (a container without pidfd_getfd).
void restrict_listeners(pid_t process, Admit admit) noexcept;

} // namespace bellows
