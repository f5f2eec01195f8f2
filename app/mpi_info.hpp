// SPDX-License-Identifier: MIT
#pragma once

// What the installed MPI says of itself, for reports. Nothing here starts MPI in this process.

#include <string>

namespace bellows {

struct MpiInfo {
    std::string library;      ///< name and version, one line
    std::string standard;     ///< e.g. "3.1"
    std::string thread_level; ///< what it gives when asked for MPI_THREAD_MULTIPLE, or why unknown
};

/// The thread level is learnt by a child process, which MPI may end as it likes; it has ten
/// seconds. Call it before there are other threads.
MpiInfo mpi_info();

} // namespace bellows
