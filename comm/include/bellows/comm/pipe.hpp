// SPDX-License-Identifier: MIT
#pragma once

// Point-to-point transport of activations and gradients between pipeline stages. Every (peer,
// direction) is an edge: a FIFO with a lane of its own. The k-th recv() from a peer takes the
// peer's k-th send() to this rank; both must have the same number of bytes. Both calls return at
// once. A send leaves as soon as its tensor is ready and then holds a copy of it, so it never waits
// for the peer; a receive that waits blocks neither sends nor other edges. Ranks may therefore post
// in any order of edges; in SyncMode::Serial, which runs one thing after the other, the order of
// posting must be one that buffered sends and blocking receives can run.
//
// A message that fails on one rank (a refused argument, no memory, a time limit) ends the job:
// every rank of the world throws that error at its next wait or call. In a world of one rank a
// refused call changes nothing.
//
// The caller opens a Transport for each Pipe (open_transport is collective over the whole world),
// hands it over and uses it for nothing else: the pipe moves its messages on a thread of its own,
// so that a peer gets them whatever this rank's lanes wait for. One thread at a time calls a Pipe.
// Where the transport was opened with the device (TransportOptions::device), messages of whole
// words to ranks that its device link reaches go from device to device; what waits for its peer
// stands in the device's memory then.

#include <bellows/comm/message.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/engine/tensor.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace bellows {

struct PipeOptions {
    std::string name = "pipe";                  ///< shown in errors and the trace
    std::uint32_t receives_ahead = 2;           ///< messages of an edge that may arrive early
    std::chrono::milliseconds timeout{120'000}; ///< of a receive, once its tensor may be written
};

struct PipeStats {
    std::uint64_t messages_sent = 0, messages_received = 0; ///< by tensors, to itself included
    std::uint64_t bytes_sent = 0, bytes_received = 0;
    double seconds_waited = 0; ///< by receives that could have gone on, for their bytes
};

class Pipe {
public:
    /// Not collective. `thread` runs the lanes. device, world, transport and thread must outlive
    /// it. Throws Error{InvalidArgument}.
    Pipe(Device& device, World& world, Transport& transport, HostThread& thread,
         PipeOptions options = {});
    /// Waits (at most 10 s) until all that was sent has left; gives receives up.
    ~Pipe();
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;

    /// x: contiguous, any dtype and shape, not strided; 0 elements are a message too. The time
    /// point: x may be written again. peer: a rank of the world, this one included.
    TimePoint send(int peer, const TensorView& x);
    /// The time point: x holds the message. Memory up to the next multiple of 4 bytes behind x
    /// exists (it is kept); x begins at such a multiple. Throws Error{InvalidArgument}.
    TimePoint recv(int peer, const TensorView& x);

    PipeStats stats() const;

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
