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

#include <mutex>

namespace bellows {

/// Collective over communicator. Works on a duplicate that returns errors, and never finalises MPI.
/// The thread level that MPI was started with:
/// - MPI_THREAD_MULTIPLE: nothing to heed;
/// - MPI_THREAD_SERIALIZED: every MPI call of the caller's own, once there is a World, is made
///   under lock_mpi(), and no such call blocks until another rank's Bellows has gone on;
/// - less: Error{Unsupported}. Bellows makes its MPI calls on threads of its own (the HostThread's
///   lanes, a pipe's wire, and one that calls MPI from time to time once a transport has been used,
///   until World::close()); there is no progress() by which a caller's single thread could make
///   them instead, and none has to be called.
/// The caller finalises MPI when the World has been closed.
World join_world(MPI_Comm communicator, const WorldOptions& options = {});

/// Keeps Bellows out of MPI while it is held; holds nothing under MPI_THREAD_MULTIPLE and in a
/// World::single(). One thread may hold several. world must outlive it.
[[nodiscard]] std::unique_lock<std::recursive_mutex> lock_mpi(const World& world);

/// The duplicate that world works on, MPI_COMM_NULL for World::single(). Not for sending: it
/// carries Bellows' own messages.
MPI_Comm communicator(const World& world) noexcept;

} // namespace bellows
