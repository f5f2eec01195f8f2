// SPDX-License-Identifier: MIT
#pragma once

// One connection of the control plane's mesh as a stream of frames, never blocking. Each frame ends
// with a SipHash tag of its direction, its number and its bytes, under a key that the two ends
// alone share: what somebody else changes, adds, repeats or leaves out is found. Not thread-safe:
// ControlPlane guards it.

#include "siphash.hpp"

#include <bellows/comm/file_descriptor.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace bellows {

enum class FrameKind : std::uint32_t { Heartbeat = 1, Message, Goodbye, Abort };

struct Frame {
    FrameKind kind = FrameKind::Heartbeat;
    std::uint64_t tag = 0;
    std::vector<std::byte> bytes;
    FileDescriptor fd;
};

/// What both ends of a connection tag their frames with.
struct FrameKey {
    SipKey key{};
    std::uint64_t sends = 0, receives = 1; ///< directions; the other end has them the other way
};

class ControlLink {
public:
    enum class State { Open, Closed, Damaged };

    ControlLink(FileDescriptor socket, const FrameKey& key)
        : socket_(std::move(socket)), key_(key) {}

    int socket() const noexcept { return socket_.get(); }
    bool is_open() const noexcept { return static_cast<bool>(socket_); }
    bool has_output() const noexcept { return !outbox_.empty(); }

    /// Appends a frame; fd, if any, travels with its first byte. Does nothing once closed.
    void queue(FrameKind kind, std::uint64_t tag, std::span<const std::byte> bytes,
               FileDescriptor fd = {});
    /// Writes what the socket takes now. Errors are left for receive() to find.
    void flush() noexcept;
    /// Takes in what has arrived. Closed: the peer has closed or broken the connection. Damaged:
    /// something has come that the peer has not sent like this. Frames that came before are still
    /// appended.
    State receive(std::vector<Frame>& frames);
    /// No more output: the peer sees the end after what was flushed.
    void finish_output() noexcept;
    void close() noexcept;

private:
    struct Header {
        std::uint32_t kind;
        std::uint32_t has_fd;
        std::uint64_t tag;
        std::uint64_t bytes;
    };
    struct Outgoing {
        std::vector<std::byte> bytes;
        std::size_t sent = 0;
        FileDescriptor fd;
    };

    std::int64_t send_some(Outgoing& frame) noexcept;
    bool take_frames(std::vector<Frame>& frames);

    FileDescriptor socket_;
    FrameKey key_;
    std::uint64_t queued_ = 0, taken_ = 0; ///< frames
    std::deque<Outgoing> outbox_;
    std::vector<std::byte> inbox_;
    std::deque<FileDescriptor> received_fds_;
};

} // namespace bellows
