// SPDX-License-Identifier: MIT
#pragma once

// Host bytes from rank to rank without ever blocking: the interface that every transport implements
// (memory that the ranks of a node share, MPI between nodes), and the waits that put a time limit
// and a useful message around it. A Transport and its Transfers belong to one thread at a time.
//
// Inside a node a message is copied once by each side. A side need not copy at all: the sender when
// the bytes stand in memory from share(), the receiver with post_recv_in_place().

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

/// Memory of this rank that the peers of its node read where it stands, as Transport::share gives
/// it. It may outlive the transport. Movable; any thread.
class SharedMemory {
public:
    SharedMemory() noexcept = default;
    /// keep_alive: gives the bytes back when it goes.
    SharedMemory(std::span<std::byte> bytes, std::shared_ptr<void> keep_alive) noexcept
        : bytes_(bytes), keep_alive_(std::move(keep_alive)) {}

    /// Page-aligned, at least as many as were asked for.
    std::span<std::byte> bytes() const noexcept { return bytes_; }
    explicit operator bool() const noexcept { return !bytes_.empty(); }

private:
    std::span<std::byte> bytes_;
    std::shared_ptr<void> keep_alive_;
};

/// A message where its sender left it.
struct InPlace {
    std::span<const std::byte> bytes;
    /// The whole SharedMemory that it lies in, as mapped here, and a number that this peer gives to
    /// no other: what was prepared for it (an import into a device) serves as long as it comes.
    std::span<std::byte> block;
    std::uint64_t block_id = 0;
    bool lasts = false; ///< false: the block goes with this message, nothing is worth preparing
    std::shared_ptr<void> mapping{}; ///< keeps the block mapped here
};

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
        /// Of a receive in place that is done; its destructor gives the bytes back to the sender.
        virtual InPlace in_place() const noexcept { return {}; }
    };

    Transfer() noexcept = default;
    Transfer(Direction direction, int peer, Tag tag, std::uint64_t expected_bytes,
             std::unique_ptr<State> state) noexcept;
    Transfer(Transfer&& other) noexcept;
    Transfer& operator=(Transfer&& other) noexcept;
    /// Cancels what is not done.
    ~Transfer();

    /// Never blocks. True once the message has been sent from, or has arrived in, the posted bytes.
    /// Throws Error{Mpi} from MPI, Error{Corrupt} if another number of bytes came than was
    /// expected, the job's failure.
    bool test();
    bool done() const noexcept { return done_; }
    /// What a receive in place that is done has brought. Valid as long as the transfer, with whose
    /// end the sender's transfer is done.
    InPlace in_place() const noexcept { return done_ && state_ ? state_->in_place() : InPlace{}; }
    /// Gives the message up. False: the transport may still touch the bytes, keep them until the
    /// process ends (possible only for a receive whose peer was lost while sending).
    bool cancel() noexcept;

    Direction direction() const noexcept { return direction_; }
    int peer() const noexcept { return peer_; }
    Tag tag() const noexcept { return tag_; }
    std::uint64_t expected_bytes() const noexcept { return expected_bytes_; }
    std::chrono::steady_clock::time_point posted() const noexcept { return posted_; }
    /// Bytes known to have moved so far, in whole chunks.
    std::uint64_t seen_bytes() const noexcept { return done_ ? seen_bytes_ : state_->seen_bytes(); }

private:
    Direction direction_ = Direction::Send;
    int peer_ = -1;
    Tag tag_;
    std::uint64_t expected_bytes_ = 0;
    std::uint64_t seen_bytes_ = 0;
    std::chrono::steady_clock::time_point posted_ = std::chrono::steady_clock::now();
    bool done_ = true;
    std::unique_ptr<State> state_; ///< null when done, unless received in place
};

class Device;
class DeviceLink;
struct TransportOptions;

class Transport {
public:
    explicit Transport(World& world) noexcept;
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;
    virtual ~Transport();

    virtual std::string_view name() const noexcept = 0;

    /// Neither waits for the peer, which may be this rank; a send inside a node copies what does
    /// not stand in memory from share(). The receiver must post exactly the sender's size. Throw
    /// Error{InvalidArgument} for a peer or stream that does not exist, Error{OutOfMemory} where
    /// there is no room for such a copy, the job's failure.
    virtual Transfer post_send(int peer, Tag tag, std::span<const std::byte> bytes) = 0;
    virtual Transfer post_recv(int peer, Tag tag, std::span<std::byte> bytes) = 0;
    /// Lets the transport move bytes of all its transfers; never blocks.
    virtual void progress() = 0;

    /// Whether messages from this peer can be received in place.
    virtual bool reads_in_place(int peer) const noexcept;
    /// As post_recv without a copy: Transfer::in_place() names the bytes. Throws
    /// Error{Unsupported} unless reads_in_place(peer).
    virtual Transfer post_recv_in_place(int peer, Tag tag, std::uint64_t bytes);
    /// Memory that messages to peers of the node are not copied from; empty where no peer shares
    /// memory. Any thread. Throws Error{OutOfMemory}.
    virtual SharedMemory share(std::uint64_t bytes);

    /// Between the devices of ranks, beside the transport; null where there is none.
    DeviceLink* device_link() const noexcept { return device_link_.get(); }
    /// What devices are linked by ("cuda"); empty where none is.
    std::string_view device_link_name() const noexcept;
    /// "" where one is, else why not.
    const std::string& why_no_device_link() const noexcept { return why_no_device_link_; }

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    ControlPlane& control() const noexcept { return *control_; }

    /// The next collective sequence number of this transport: ranks that exchange with each other
    /// must draw in the same order. Groups that draw independently need a transport each.
    std::uint64_t next_sequence() noexcept { return sequence_.fetch_add(1); }

protected:
    void require(int peer, Tag tag) const;

private:
    friend std::unique_ptr<Transport> open_transport(World&, const TransportOptions&);

    ControlPlane* control_;
    int rank_;
    int size_;
    std::atomic<std::uint64_t> sequence_{0};
    std::unique_ptr<DeviceLink> device_link_;
    std::string why_no_device_link_;
};

/// How devices of one node's ranks copy from each other without the host's memory between them.
enum class DeviceLinkKind : std::uint8_t {
    Auto, ///< as a vendor's driver offers, found at run time (libcuda.so.1); else not at all
    Off,
    Host, ///< through host memory, for devices that it serves (CPU drivers): the same path in tests
};

const char* to_string(DeviceLinkKind kind) noexcept;
/// "auto", "off" or "host". Throws Error{InvalidArgument}.
DeviceLinkKind device_link_kind(std::string_view text);

struct TransportOptions {
    /// Messages are cut into pieces of this size; MPI counts are 32-bit. Same on every rank.
    std::uint64_t max_message_bytes = std::uint64_t{1} << 30;
    std::chrono::milliseconds setup_timeout{60'000};
    /// Inside a node through memory that its ranks share, where the system lets them; false: all
    /// through MPI.
    bool share_memory = true;
    /// The device whose exchanges go through this transport: where it can be linked with those of
    /// the node's other ranks, their records go from device to device. Null: never. It must outlive
    /// the transport.
    Device* device = nullptr;
    DeviceLinkKind device_link = DeviceLinkKind::Auto;
};

/// Collective over the whole world, in the same order on every rank, even for ranks that will not
/// use it. MPI on a communicator of its own between nodes, memory alone in a World::single(). world
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
