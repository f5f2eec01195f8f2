// SPDX-License-Identifier: MIT
#pragma once

// Collectives on device tensors over a group of ranks: all-reduce, reduce-scatter, all-gather,
// broadcast, and moves from many to many by a table. Every sum is taken in f32 on the device in
// ascending rank order, (x0 + x1) + x2 ..., that of moves in the order of the table, so all ranks
// get the same bits in every run, for every chunk size and transport. The calls only
// hand work in; each returns the time point of its result and never waits for the network.
//
// All ranks of the group make the same calls in the same order with the same counts. A call that
// fails on one rank (a refused argument, no memory, a time limit) ends the job: every rank of the
// world throws that error with the rank, the phase and the counts, at its next wait or call. Only
// in a group of one a refused call changes nothing. The caller
// opens the Transport (open_transport is collective over the whole world) and gives it to one
// Collectives, or to several users that draw from it in one order on all ranks that meet there:
// groups whose ranks make calls independently of each other need a transport each. One thread at a
// time calls a Collectives. Where the transport was opened with the device (TransportOptions::
// device) and its device link connects all members, tensors of whole words that are larger than
// small_bytes go from device to device.

#include <bellows/base/rounding.hpp>
#include <bellows/comm/configuration.hpp>
#include <bellows/comm/message.hpp>
#include <bellows/comm/topology.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/engine/lane.hpp>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace bellows {

/// Bytes that one member of the group gives another, or itself. from and to are positions in the
/// group. Places and sizes are multiples of 4 bytes.
struct MemoryMove {
    int from = 0, to = 0;
    std::uint64_t from_byte = 0; ///< in the source of `from`
    std::uint64_t to_byte = 0;   ///< in the target of `to`
    std::uint64_t bytes = 0;     ///< 0: nothing moves
};

struct CollectivesStats {
    std::uint64_t collectives = 0; ///< ended ones
    std::uint64_t bytes_sent = 0;  ///< to other ranks
    std::uint64_t bytes_received = 0;
    std::uint64_t messages_sent = 0;
    double seconds_waited = 0; ///< of all collectives: with nothing to do but wait for the network
};

class Collectives {
public:
    /// Not collective. `thread` runs the lanes. device, world, transport and thread must outlive
    /// it. Throws Error{InvalidArgument} unless the group holds this rank and lies in the world.
    Collectives(Device& device, World& world, Transport& transport, HostThread& thread, Group group,
                CollectivesOptions options = {});
    /// What was handed in still runs.
    ~Collectives();

    const Group& group() const noexcept;
    /// This rank's position in the group.
    int position() const noexcept;

    /// Memory of the device that lives as long as this and what it runs. Over a device link sums
    /// of tensors that stand in it take the others' parts straight from there, and what is gathered
    /// in them in place, sums to all and broadcasts among it, goes straight to there. Of and to
    /// others it takes copies, which need the device, memory, and time on the host for each chunk.
    /// Not collective. Throws Error{OutOfMemory}.
    BufferView make_memory(std::string name, std::uint64_t bytes, MemoryCategory category);
    /// What `other`, which lives longer, has made so far is as good as what make_memory() gives
    /// here. Not collective. Throws Error{Io} without file descriptors left.
    void use_memory_of(const Collectives& other);

    /// x (any shape, f32, contiguous) becomes the sum of all ranks' x.
    TimePoint all_reduce(const TensorView& x);
    /// mine: [share of x's elements] f32 becomes the sum over all ranks of that part of x (any
    /// shape, f32, contiguous). x is left as it is; mine may be this rank's part of x.
    /// counts: elements of each member's share, in order; empty: share_of().
    TimePoint reduce_scatter(const TensorView& x, const TensorView& mine,
                             std::span<const std::uint64_t> counts = {});
    /// all becomes the concatenation of the ranks' `mine`, any dtype, contiguous. mine: [share of
    /// all's elements], may be this rank's part of `all`. counts: as above. `all` begins at a
    /// multiple of 4 bytes, and the memory behind its last byte up to the next such multiple exists
    /// (it is kept).
    TimePoint all_gather(const TensorView& mine, const TensorView& all,
                         std::span<const std::uint64_t> counts = {});
    /// x (any dtype, contiguous, as all_gather's `all`) of member `root` goes to all.
    TimePoint broadcast(int root, const TensorView& x);

    /// From many to many, as a table says: the target of each move's `to` gets the bytes of the
    /// source of its `from`, bit for bit. moves: the same list on every member; it need not outlive
    /// the call. Source ranges may repeat and overlap (one to many), target ranges must not
    /// overlap. Bytes of the target that no move names are kept.
    /// source, target: this rank's memory (any dtype and shape, contiguous, begin at a multiple of
    /// 4 bytes); empty where it gives or takes nothing. They may be the same memory as long as the
    /// rank gives no byte that it also takes. Other work sees a read of the whole source and a
    /// write of the whole target. Throws Error{InvalidArgument} for positions, places or sizes that
    /// do not fit. Lists that differ are noticed where messages then differ in size
    /// (Error{Corrupt}) or are missing (Error{Timeout}).
    TimePoint move(const TensorView& source, const TensorView& target,
                   std::span<const MemoryMove> moves);
    /// The same of f32, where several moves may have the same target range (equal begin and size,
    /// else Error{InvalidArgument}): the target becomes the sum of what they bring, in the order of
    /// the list, ((x0 + x1) + x2) + ..., with the same bits for every chunk size and transport.
    /// What one move alone brings is copied, bit for bit. What the target held is not added.
    TimePoint sum_moves(const TensorView& source, const TensorView& target,
                        std::span<const MemoryMove> moves);

    CollectivesStats stats() const;

    struct Impl;

private:
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
