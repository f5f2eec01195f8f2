// SPDX-License-Identifier: MIT
#pragma once

// The command's exit codes, and which error gives which: the one place that says so.

#include <bellows/base/error.hpp>

#include <chrono>

namespace bellows {

enum ExitCode : int {
    kExitGood = 0,
    kExitWrongResult = 1, ///< a check failed, or a bug
    kExitBadInput = 2,    ///< usage, configuration, data or checkpoint
    kExitNoDevice = 3, ///< no device (or MPI) that serves, one that failed or did not end in time
    kExitPeerLost = 4,
    kExitStopped = 5,  ///< a signal asked a run to stop, and it has written a checkpoint
    kExitNotSaved = 6, ///< the last checkpoint of a run could not be written
    kExitDiverged = 7, ///< the gradient or the loss of a run stays non-finite
};

constexpr int exit_code_of(ErrorCode code) noexcept {
    switch (code) {
    case ErrorCode::InvalidArgument:
    case ErrorCode::Io:
    case ErrorCode::Corrupt:
        return kExitBadInput;
    case ErrorCode::Unsupported:
    case ErrorCode::OutOfMemory:
    case ErrorCode::DeviceLost:
    case ErrorCode::Vulkan:
    case ErrorCode::Timeout: // no rank was lost: heartbeats would have said so
        return kExitNoDevice;
    case ErrorCode::Mpi:
    case ErrorCode::PeerLost:
    case ErrorCode::Aborted:
        return kExitPeerLost;
    case ErrorCode::Diverged:
        return kExitDiverged;
    case ErrorCode::Internal:
        return kExitWrongResult;
    }
    return kExitWrongResult;
}

/// A process whose work is done has this time to end.
inline constexpr std::chrono::seconds kEndLimit{20};

} // namespace bellows
