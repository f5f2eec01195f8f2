// SPDX-License-Identifier: MIT
#pragma once

// The transports behind open_transport().

#include <bellows/comm/message.hpp>

#include <memory>

namespace bellows {

/// Collective; world has MPI.
std::unique_ptr<Transport> make_mpi_transport(World& world, const TransportOptions& options);

/// Collective. Messages to ranks that share memory with this one go through that, others through
/// `network`; `network` itself where there is no such rank. Not sharing (options) is still a call.
std::unique_ptr<Transport> make_node_transport(World& world, const TransportOptions& options,
                                               std::unique_ptr<Transport> network);

} // namespace bellows
