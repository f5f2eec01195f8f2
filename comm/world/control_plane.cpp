// SPDX-License-Identifier: MIT
#include <bellows/comm/control_plane.hpp>

#include "control_plane_impl.hpp"
#include "fail_together.hpp"
#include "socket.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>

namespace bellows {
namespace {

constexpr std::uint64_t kInternalTag = std::uint64_t{1} << 63;
constexpr std::uint64_t kUserTagLimit = kInternalTag;

struct ErrorHeader {
    std::int32_t code;
    std::int32_t rank;
    std::int64_t detail;
};

template <class Message>
FileDescriptor descriptor_of(Message message, int from, std::uint64_t tag) {
    if (!message.fd)
        throw Error(ErrorCode::Corrupt,
                    "rank " + std::to_string(from) + " sent a message with tag " +
                        std::to_string(tag) + " without the file descriptor expected",
                    from);
    return std::move(message.fd);
}

} // namespace

int severity(ErrorCode code) noexcept {
    switch (code) {
    case ErrorCode::Aborted:
        return 0;
    case ErrorCode::Timeout:
        return 1;
    case ErrorCode::Diverged: // every rank has found it by itself
    case ErrorCode::InvalidArgument:
        return 2;
    case ErrorCode::Unsupported:
        return 3;
    case ErrorCode::Io:
        return 4;
    case ErrorCode::Corrupt:
        return 5;
    case ErrorCode::OutOfMemory:
        return 6;
    case ErrorCode::Mpi:
        return 7;
    case ErrorCode::Vulkan:
        return 8;
    case ErrorCode::DeviceLost:
        return 9;
    case ErrorCode::PeerLost:
        return 10;
    case ErrorCode::Internal:
        return 11;
    }
    return 12;
}

std::vector<std::byte> encode_error(const Error& error) {
    // Cut so that the longest message still fits a frame.
    const std::string text = error.message().substr(0, 65536);
    const ErrorHeader header{static_cast<std::int32_t>(error.code()), error.rank(), error.detail()};
    std::vector<std::byte> bytes(sizeof header + text.size());
    std::memcpy(bytes.data(), &header, sizeof header);
    if (!text.empty())
        std::memcpy(bytes.data() + sizeof header, text.data(), text.size());
    return bytes;
}

Error decode_error(std::span<const std::byte> bytes, int from) {
    ErrorHeader header{};
    if (bytes.size() < sizeof header)
        return Error(ErrorCode::Corrupt,
                     "rank " + std::to_string(from) + " reported an error that cannot be read",
                     from);
    std::memcpy(&header, bytes.data(), sizeof header);
    const bool known = header.code >= 0 && header.code <= static_cast<int>(ErrorCode::Internal);
    const auto text = bytes.subspan(sizeof header);
    return Error(known ? static_cast<ErrorCode>(header.code) : ErrorCode::Internal,
                 std::string(reinterpret_cast<const char*>(text.data()), text.size()), header.rank,
                 header.detail);
}

void ControlPlane::Impl::fail(const Error& error) {
    if (failure || leaving)
        return;
    failure = error;
    has_failed.store(true);
    const std::vector<std::byte> bytes = encode_error(error);
    for (Peer& peer : peers) {
        peer.link.queue(FrameKind::Abort, 0, bytes);
        peer.link.flush();
    }
    changed.notify_all();
    wake();
}

void ControlPlane::Impl::abort(const Error& error) {
    const bool about_this_rank = error.rank() < 0 || error.rank() == rank;
    const std::string name = "rank " + std::to_string(rank) + ": ";
    const bool named = error.message().starts_with(name);
    const std::lock_guard lock(mutex);
    fail(Error(error.code(), (about_this_rank && !named ? name : "") + error.message(),
               about_this_rank ? rank : error.rank(), error.detail()));
}

std::string ControlPlane::Impl::describe(int r) const {
    const Peer& peer = peers[static_cast<std::size_t>(r)];
    return "rank " + std::to_string(r) + " (pid " + std::to_string(peer.pid) + " on " + peer.host +
           ")";
}

void ControlPlane::Impl::require_peer(int peer) const {
    if (peer < 0 || peer >= size)
        throw Error(ErrorCode::InvalidArgument, "rank " + std::to_string(peer) +
                                                    " does not exist: there are " +
                                                    std::to_string(size) + " ranks");
}

void ControlPlane::Impl::require_active() const {
    if (failure)
        throw *failure;
    if (leaving)
        throw Error(ErrorCode::Aborted,
                    "rank " + std::to_string(rank) + " has left the job and talks to nobody", rank);
}

void ControlPlane::Impl::throw_peer_gone(int peer) const {
    if (const auto& loss = peers[static_cast<std::size_t>(peer)].loss)
        throw Error(*loss);
    throw Error(ErrorCode::PeerLost,
                describe(peer) + " has left the job while rank " + std::to_string(rank) +
                    " still had to talk to it" + seen_when(),
                peer);
}

void ControlPlane::Impl::send(int to, std::uint64_t tag, std::span<const std::byte> bytes,
                              FileDescriptor fd) {
    if (bytes.size() > kMaxMessageBytes)
        throw Error(ErrorCode::InvalidArgument,
                    "a control message of " + std::to_string(bytes.size()) +
                        " bytes exceeds the limit of " + std::to_string(kMaxMessageBytes) +
                        "; use a Transport");
    const std::lock_guard lock(mutex);
    require_peer(to);
    require_active();
    if (to == rank) {
        inbox[{rank, tag}].push_back({{bytes.begin(), bytes.end()}, std::move(fd)});
        changed.notify_all();
        return;
    }
    Peer& peer = peers[static_cast<std::size_t>(to)];
    if (peer.state != PeerState::Present || !peer.link.is_open())
        throw_peer_gone(to);
    peer.link.queue(FrameKind::Message, tag, bytes, std::move(fd));
    peer.link.flush();
    if (peer.link.has_output())
        wake();
}

std::optional<ControlPlane::Impl::Message> ControlPlane::Impl::take(int from, std::uint64_t tag) {
    const auto queue = inbox.find({from, tag});
    if (queue == inbox.end())
        return std::nullopt;
    Message message = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty())
        inbox.erase(queue);
    return message;
}

ControlPlane::Impl::Message ControlPlane::Impl::receive(int from, std::uint64_t tag,
                                                        Milliseconds timeout) {
    const Deadline deadline(timeout);
    std::unique_lock lock(mutex);
    require_peer(from);
    for (;;) {
        if (std::optional<Message> message = take(from, tag))
            return std::move(*message);
        require_active();
        if (from != rank && peers[static_cast<std::size_t>(from)].state != PeerState::Present)
            throw_peer_gone(from);
        if (deadline.expired())
            throw Error(ErrorCode::Timeout,
                        "rank " + std::to_string(rank) + " waited " +
                            std::to_string(timeout.count()) + " ms for a control message (tag " +
                            std::to_string(tag) + ") of " + describe(from),
                        from);
        changed.wait_until(lock, deadline.end());
    }
}

ControlPlane::ControlPlane(int rank, int size, const ControlOptions& options,
                           const AllGather& all_gather)
    : impl_(std::make_unique<Impl>(rank, size, options, all_gather)) {
}

ControlPlane::~ControlPlane() = default;

int ControlPlane::rank() const noexcept {
    return impl_->rank;
}
int ControlPlane::size() const noexcept {
    return impl_->size;
}

void ControlPlane::abort(const Error& error) noexcept {
    try {
        impl_->abort(error);
    } catch (...) { // out of memory: the peers will see the closed connection instead
    }
}

std::optional<Error> ControlPlane::failure() const {
    const std::lock_guard lock(impl_->mutex);
    return impl_->failure;
}

bool ControlPlane::failed() const noexcept {
    return impl_->has_failed.load();
}

bool ControlPlane::any_lost() const noexcept {
    return impl_->num_lost.load(std::memory_order_acquire) > 0;
}

bool ControlPlane::outlives_lost_ranks() const noexcept {
    return impl_->outlives_lost_ranks;
}

bool ControlPlane::lost(int peer) const noexcept {
    if (!any_lost())
        return false;
    const std::lock_guard lock(impl_->mutex);
    return impl_->peers[static_cast<std::size_t>(peer)].loss.has_value();
}

void ControlPlane::throw_if_lost(int peer) const {
    if (!any_lost())
        return;
    const std::lock_guard lock(impl_->mutex);
    if (impl_->peers[static_cast<std::size_t>(peer)].loss)
        impl_->throw_peer_gone(peer);
}

bool ControlPlane::unless_lost(int peer, const std::function<void()>& act) const {
    try {
        act();
        return true;
    } catch (const Error& error) {
        if (error.code() != ErrorCode::PeerLost || !lost(peer))
            throw;
        return false;
    }
}

int ControlPlane::first_living() const noexcept {
    int rank = 0;
    while (lost(rank)) // this rank is not
        ++rank;
    return rank;
}

void ControlPlane::throw_if_failed() const {
    if (failed())
        throw *failure();
}

ControlPlane::Subscription::Subscription(Subscription&& other) noexcept
    : owner_(std::exchange(other.owner_, nullptr)), id_(other.id_) {
}

ControlPlane::Subscription& ControlPlane::Subscription::operator=(Subscription&& other) noexcept {
    if (this != &other) {
        reset();
        owner_ = std::exchange(other.owner_, nullptr);
        id_ = other.id_;
    }
    return *this;
}

ControlPlane::Subscription::~Subscription() {
    reset();
}

void ControlPlane::Subscription::reset() noexcept {
    if (ControlPlane* owner = std::exchange(owner_, nullptr)) {
        const std::lock_guard lock(owner->impl_->callback_mutex);
        owner->impl_->callbacks.erase(id_);
    }
}

ControlPlane::Subscription ControlPlane::on_failure(std::function<void(const Error&)> callback) {
    Subscription subscription;
    {
        const std::lock_guard lock(impl_->callback_mutex);
        subscription.owner_ = this;
        subscription.id_ = impl_->next_callback++;
        impl_->callbacks.emplace(subscription.id_, Impl::Callback{std::move(callback)});
    }
    impl_->wake();
    return subscription;
}

void ControlPlane::send(int to, std::uint64_t tag, std::span<const std::byte> bytes) {
    if (tag >= kUserTagLimit)
        throw Error(ErrorCode::InvalidArgument, "control tags must be below 2^63");
    impl_->send(to, tag, bytes, {});
}

ControlPlane::Impl::Message ControlPlane::Impl::receive_or_tell(int from, std::uint64_t tag,
                                                                Milliseconds timeout) {
    try {
        return receive(from, tag, timeout);
    } catch (const Error& error) {
        if (!has_failed.load())
            throw;
        throw meanwhile(error, rank,
                        "a wait for a control message (tag " + std::to_string(tag) + ") of rank " +
                            std::to_string(from));
    }
}

std::vector<std::byte> ControlPlane::recv(int from, std::uint64_t tag, Milliseconds timeout) {
    return impl_->receive_or_tell(from, tag, timeout).bytes;
}

bool ControlPlane::can_pass_fds(int peer) const {
    impl_->require_peer(peer);
    return impl_->peers[static_cast<std::size_t>(peer)].passes_fds;
}

void ControlPlane::send_fd(int to, std::uint64_t tag, int fd) {
    if (tag >= kUserTagLimit)
        throw Error(ErrorCode::InvalidArgument, "control tags must be below 2^63");
    if (!can_pass_fds(to))
        throw Error(ErrorCode::Unsupported,
                    "file descriptors cannot be passed from rank " + std::to_string(rank()) +
                        " to rank " + std::to_string(to) + ": they are not on one host",
                    to);
    FileDescriptor duplicate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!duplicate)
        throw net::errno_error("cannot duplicate descriptor " + std::to_string(fd), errno);
    impl_->send(to, tag, {}, std::move(duplicate));
}

FileDescriptor ControlPlane::recv_fd(int from, std::uint64_t tag, Milliseconds timeout) {
    return descriptor_of(impl_->receive_or_tell(from, tag, timeout), from, tag);
}

std::optional<FileDescriptor> ControlPlane::try_recv_fd(int from, std::uint64_t tag) {
    std::optional<Impl::Message> message;
    {
        const std::lock_guard lock(impl_->mutex);
        impl_->require_peer(from);
        message = impl_->take(from, tag);
    }
    if (!message) {
        throw_if_failed();
        return std::nullopt;
    }
    return descriptor_of(std::move(*message), from, tag);
}

std::int64_t ControlPlane::peer_pid(int peer) const {
    impl_->require_peer(peer);
    return impl_->peers[static_cast<std::size_t>(peer)].pid;
}

void ControlPlane::leave() noexcept {
    impl_->leave();
}

} // namespace bellows
