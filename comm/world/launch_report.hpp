// SPDX-License-Identifier: MIT
#pragma once

// What a rank tells the process that launched it: datagrams to an abstract Unix socket whose name
// stands in the environment.

#include <cstddef>
#include <cstdint>

namespace bellows {

constexpr const char* kLaunchSocket = "BELLOWS_LAUNCH_SOCKET";
/// Behind the name: a socket of their own for phases, which may be many while the launcher is
/// suspended and must not keep an end from it.
constexpr const char* kPhaseSocket = "-phase";
constexpr std::size_t kMaxReason = 4096;
/// The exit code of a run that has lost a rank.
constexpr int kPeerLostExit = 4;

struct LaunchReport {
    std::int32_t rank;
    std::int32_t exit_code;    ///< kAlive, kStarted, kPhase: not an end
    std::int64_t limit_ms = 0; ///< of the phase; 0: none
    // the text of the reason or the phase follows
};

constexpr std::int32_t kAlive = -2;   ///< the process is there, MPI has not started
constexpr std::int32_t kStarted = -1; ///< it has its World
constexpr std::int32_t kPhase = -3;   ///< it begins something else

} // namespace bellows
