// SPDX-License-Identifier: MIT
#pragma once

// Set-up of the control plane's mesh: one authenticated connection to every other rank. Both ends
// prove that they know the job's random key (exchanged once through the launcher's own channel,
// MPI) with a SipHash over fresh nonces; Unix peers must also run as the same user.

#include "control_link.hpp"

#include <bellows/comm/control_plane.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

struct MeshConnection {
    FileDescriptor socket; ///< empty for this rank itself
    FrameKey frame_key;    ///< of this connection
    bool passes_fds = false;
    std::int64_t pid = 0;
    std::string host;
};

/// Collective; one entry per rank. Throws Error{Timeout} naming a rank that could not be reached.
std::vector<MeshConnection> connect_mesh(int rank, int size, const ControlOptions& options,
                                         const ControlPlane::AllGather& all_gather);

} // namespace bellows
