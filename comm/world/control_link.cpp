// SPDX-License-Identifier: MIT
#include "control_link.hpp"

#include <bellows/comm/control_plane.hpp>

#include <array>
#include <cerrno>
#include <cstring>
#include <sys/socket.h>

namespace bellows {
namespace {

constexpr std::size_t kMaxFdsPerRead = 16;

union FdBuffer { // aligned as the kernel wants it
    cmsghdr align;
    std::array<char, CMSG_SPACE(kMaxFdsPerRead * sizeof(int))> bytes;
};

void collect_fds(msghdr& message, std::deque<FileDescriptor>& fds) {
    for (cmsghdr* item = CMSG_FIRSTHDR(&message); item; item = CMSG_NXTHDR(&message, item)) {
        if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS)
            continue;
        const std::size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
            int fd = -1;
            std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof fd);
            fds.emplace_back(fd);
        }
    }
}

/// Whether sending fails for a while only: the socket is full, the kernel short of memory, too many
/// descriptors are under way.
bool passes_by(int error) {
    return error == EAGAIN || error == ENOBUFS || error == ENOMEM || error == ETOOMANYREFS;
}

} // namespace

void ControlLink::queue(FrameKind kind, std::uint64_t tag, std::span<const std::byte> bytes,
                        FileDescriptor fd) {
    if (!is_open())
        return;
    const Header header{static_cast<std::uint32_t>(kind), fd ? 1u : 0u, tag, bytes.size()};
    Outgoing frame;
    const std::size_t size = sizeof header + bytes.size();
    frame.bytes.resize(size + sizeof(SipTag));
    std::memcpy(frame.bytes.data(), &header, sizeof header);
    if (!bytes.empty())
        std::memcpy(frame.bytes.data() + sizeof header, bytes.data(), bytes.size());
    const SipTag proof = siphash_128(key_.key, std::array{key_.sends, queued_++},
                                     std::span(frame.bytes).first(size));
    std::memcpy(frame.bytes.data() + size, proof.data(), sizeof proof);
    frame.fd = std::move(fd);
    outbox_.push_back(std::move(frame));
}

std::int64_t ControlLink::send_some(Outgoing& frame) noexcept {
    iovec part{frame.bytes.data() + frame.sent, frame.bytes.size() - frame.sent};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    FdBuffer buffer{};
    if (frame.fd) {
        message.msg_control = buffer.bytes.data();
        message.msg_controllen = CMSG_SPACE(sizeof(int));
        cmsghdr* item = CMSG_FIRSTHDR(&message);
        item->cmsg_level = SOL_SOCKET;
        item->cmsg_type = SCM_RIGHTS;
        item->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = frame.fd.get();
        std::memcpy(CMSG_DATA(item), &fd, sizeof fd);
    }
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0)
        frame.fd.reset();
    return sent;
}

void ControlLink::flush() noexcept {
    while (is_open() && !outbox_.empty()) {
        Outgoing& frame = outbox_.front();
        const std::int64_t sent = send_some(frame);
        if (sent < 0) {
            if (errno == EINTR)
                continue;
            if (!passes_by(errno)) {
                outbox_.clear();
                ::shutdown(socket_.get(), SHUT_RDWR); // both ends are to see it
            }
            return;
        }
        frame.sent += static_cast<std::size_t>(sent);
        if (frame.sent == frame.bytes.size())
            outbox_.pop_front();
    }
}

ControlLink::State ControlLink::receive(std::vector<Frame>& frames) {
    if (!is_open())
        return State::Closed;
    std::array<std::byte, 65536> chunk;
    for (;;) {
        iovec part{chunk.data(), chunk.size()};
        FdBuffer buffer;
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = buffer.bytes.data();
        message.msg_controllen = buffer.bytes.size();
        const ssize_t got = ::recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && errno == EAGAIN)
            return State::Open;
        if (got <= 0)
            return State::Closed;
        collect_fds(message, received_fds_);
        inbox_.insert(inbox_.end(), chunk.begin(), chunk.begin() + got);
        if (!take_frames(frames))
            return State::Damaged;
    }
}

bool ControlLink::take_frames(std::vector<Frame>& frames) {
    std::size_t at = 0;
    bool valid = true;
    while (inbox_.size() - at >= sizeof(Header)) {
        Header header;
        std::memcpy(&header, inbox_.data() + at, sizeof header);
        valid = header.kind >= static_cast<std::uint32_t>(FrameKind::Heartbeat) &&
                header.kind <= static_cast<std::uint32_t>(FrameKind::Abort) &&
                header.bytes <= ControlPlane::kMaxMessageBytes;
        if (!valid || inbox_.size() - at - sizeof header < header.bytes + sizeof(SipTag))
            break;
        const std::size_t size = sizeof header + header.bytes;
        SipTag proof;
        std::memcpy(proof.data(), inbox_.data() + at + size, sizeof proof);
        valid = equal_constant_time(proof, siphash_128(key_.key, std::array{key_.receives, taken_},
                                                       std::span(inbox_).subspan(at, size)));
        if (!valid)
            break;
        ++taken_;
        const auto begin = inbox_.begin() + static_cast<std::ptrdiff_t>(at + sizeof header);
        Frame frame;
        frame.kind = static_cast<FrameKind>(header.kind);
        frame.tag = header.tag;
        frame.bytes.assign(begin, begin + static_cast<std::ptrdiff_t>(header.bytes));
        if (header.has_fd != 0 && !received_fds_.empty()) {
            frame.fd = std::move(received_fds_.front());
            received_fds_.pop_front();
        }
        frames.push_back(std::move(frame));
        at += size + sizeof proof;
    }
    inbox_.erase(inbox_.begin(), inbox_.begin() + static_cast<std::ptrdiff_t>(at));
    return valid;
}

void ControlLink::finish_output() noexcept {
    if (is_open())
        ::shutdown(socket_.get(), SHUT_WR);
}

void ControlLink::close() noexcept {
    socket_.reset();
    outbox_.clear();
}

} // namespace bellows
