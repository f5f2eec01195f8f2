// SPDX-License-Identifier: MIT
#pragma once

// Host bytes from rank to rank without ever blocking: the interface that every transport implements
// (MPI first; shared memory and device links fit behind it), and the waits that put a time limit
// and a useful message around it. A Transport and its Transfers belong to one thread at a time.

#include <bellows/comm/world.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace bellows {

/// What pairs a send with its receive: the exchange's collective sequence number, and which of that
/// exchange's messages it is. Sends with equal tags to one peer arrive in the order of posting.
struct Tag {
    static constexpr std::uint32_t kStreams = 64;

    std::uint64_t sequence = 0;
    std::uint32_t stream = 0; ///< < kStreams
};

enum class Direction : std::uint8_t { Send, Receive };

/// One message under way. The posted bytes must live until it is done or cancel() returned true.
class Transfer {
public:
    /// What a transport implements. Calls come from one thread at a time.
    class State {
    public:
        virtual ~State() = default;
        /// Moves what can be moved now; true once all is. Throws on failure. Never blocks.
        virtual bool test() = 0;
        /// Lets go of the bytes; false if that cannot be known (see Transfer::cancel).
        virtual bool cancel() noexcept = 0;
        virtual std::uint64_t seen_bytes() const noexcept = 0;
    };

    Transfer() noexcept = default;
    Transfer(Direction direction, int peer, Tag tag, std::uint64_t expected_bytes,
             std::unique_ptr<State> state) noexcept;
    Transfer(Transfer&&) noexcept = default;
    Transfer& operator=(Transfer&& other) noexcept;
    /// Cancels what is not done.
    ~Transfer();

    /// Never blocks. True once the message has been sent from, or has arrived in, the posted bytes.
    /// Throws Error{Mpi} from MPI, Error{Corrupt} if another number of bytes came than was
    /// expected, the job's failure.
    bool test();
    bool done() const noexcept { return !state_; }
    /// Gives the message up. False: the transport may still touch the bytes, keep them until the
    /// process ends (possible only for a receive whose peer was lost while sending).
    bool cancel() noexcept;

    Direction direction() const noexcept { return direction_; }
    int peer() const noexcept { return peer_; }
    Tag tag() const noexcept { return tag_; }
    std::uint64_t expected_bytes() const noexcept { return expected_bytes_; }
    std::chrono::steady_clock::time_point posted() const noexcept { return posted_; }
    /// Bytes known to have moved so far, in whole chunks.
    std::uint64_t seen_bytes() const noexcept {
        return state_ ? state_->seen_bytes() : seen_bytes_;
    }

private:
    Direction direction_ = Direction::Send;
    int peer_ = -1;
    Tag tag_;
    std::uint64_t expected_bytes_ = 0;
    std::uint64_t seen_bytes_ = 0;
    std::chrono::steady_clock::time_point posted_ = std::chrono::steady_clock::now();
    std::unique_ptr<State> state_; ///< null when done
};

class Transport {
public:
    explicit Transport(World& world) noexcept;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;
    virtual ~Transport() = default;

    virtual std::string_view name() const noexcept = 0;

    /// Both return at once; peer may be this rank. The receiver must post exactly the sender's
    /// size. Throw Error{InvalidArgument} for a peer or stream that does not exist, the job's
    /// failure.
    virtual Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) = 0;
    virtual Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) = 0;
    /// Lets the transport move bytes of all its transfers; never blocks.
    virtual void progress() = 0;

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    ControlPlane& control() const noexcept { return *control_; }

    /// The next collective sequence number of this transport: ranks that exchange with each other
    /// must draw in the same order. Groups that draw independently need a transport each.
    std::uint64_t next_sequence() noexcept { return sequence_.fetch_add(1); }

protected:
    void require(int peer, Tag tag) const;

private:
    ControlPlane* control_;
    int rank_;
    int size_;
    std::atomic<std::uint64_t> sequence_{0};
};

struct TransportOptions {
    /// Messages are cut into pieces of this size; MPI counts are 32-bit. Same on every rank.
    std::uint64_t max_message_bytes = std::uint64_t{1} << 30;
    std::chrono::milliseconds setup_timeout{60'000};
};

/// Collective over the whole world, in the same order on every rank, even for ranks that will not
/// use it. MPI on a communicator of its own, or memory copies alone in a World::single(). world
/// must outlive it. Throws Error{Timeout}, Error{Mpi}, the job's failure.
std::unique_ptr<Transport> open_transport(World& world, const TransportOptions& options = {});

/// Polls until all are done. After timeout throws timeout_error(); throws what test() throws, the
/// job's failure with the phase and describe_transfers(). The transfers that are not done stay
/// posted: cancel or keep them.
void wait_all(Transport& transport, std::span<Transfer> transfers, std::string_view phase,
              std::chrono::milliseconds timeout);

/// How many of the messages are done, and of the others (the first eight) the peer with expected
/// and seen bytes.
std::string describe_transfers(std::span<const Transfer> transfers);

/// Error{Timeout} that names who waits for whom in which phase, with expected and seen bytes; its
/// rank() is the first peer that is waited for.
Error timeout_error(const Transport& transport, std::span<const Transfer> transfers,
                    std::string_view phase, std::chrono::milliseconds waited);

} // namespace bellows
