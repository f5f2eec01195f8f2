// SPDX-License-Identifier: MIT
#pragma once

// The one public header that includes <mpi.h>: for programs that bring their own communicator.

#include <bellows/comm/world.hpp>

// The C interface alone: MPI's old C++ classes are neither needed nor free of warnings.
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

namespace bellows {

/// Collective over communicator. Works on a duplicate that returns errors, and never finalises MPI.
/// MPI must have been started with MPI_THREAD_MULTIPLE, or with MPI_THREAD_SERIALIZED if the caller
/// makes no MPI call while Bellows works; else Error{Unsupported}.
World join_world(MPI_Comm communicator, const WorldOptions& options = {});

/// The duplicate that world works on, MPI_COMM_NULL for World::single(). Not for sending: it
/// carries Bellows' own messages.
MPI_Comm communicator(const World& world) noexcept;

} // namespace bellows
