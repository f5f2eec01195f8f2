// SPDX-License-Identifier: MIT

// The background half of the control plane: reading, heartbeats, who is dead, callbacks.

#include "control_mesh.hpp"
#include "control_plane_impl.hpp"
#include "socket.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

namespace bellows {
namespace {

constexpr Milliseconds kDefaultStallTimeout{15'000};
constexpr Milliseconds kFarewellTimeout{1000};

Milliseconds stall_timeout_from(const ControlOptions& options) {
    if (options.stall_timeout)
        return *options.stall_timeout;
    const char* text = std::getenv("BELLOWS_STALL_SECONDS");
    if (!text || !*text)
        return kDefaultStallTimeout;
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    if (*end != '\0' || !(seconds >= 0 && seconds <= 1e6))
        throw Error(ErrorCode::InvalidArgument,
                    std::string("BELLOWS_STALL_SECONDS is '") + text +
                        "'; it must be a number of seconds, 0 to never call a peer stalled");
    return Milliseconds{static_cast<std::int64_t>(seconds * 1000)};
}

} // namespace

ControlPlane::Impl::Impl(int rank_, int size_, const ControlOptions& options,
                         const AllGather& all_gather)
    : rank(rank_), size(size_), heartbeat_interval(options.heartbeat_interval),
      stall_timeout(stall_timeout_from(options)), outlives_lost_ranks(options.outlive_lost_ranks) {
    if (size < 1 || rank < 0 || rank >= size || heartbeat_interval < Milliseconds{1})
        throw Error(ErrorCode::InvalidArgument,
                    "control plane of rank " + std::to_string(rank) + " of " +
                        std::to_string(size) + " with a heartbeat every " +
                        std::to_string(heartbeat_interval.count()) + " ms cannot be");
    std::vector<MeshConnection> mesh(1);
    if (size > 1)
        mesh = connect_mesh(rank, size, options, all_gather);
    else
        mesh.front().pid = ::getpid();
    const auto now = Clock::now();
    for (MeshConnection& connection : mesh)
        peers.push_back({ControlLink(std::move(connection.socket), connection.frame_key),
                         connection.passes_fds, connection.pid, std::move(connection.host),
                         PeerState::Present, now});
    peers[static_cast<std::size_t>(rank)].passes_fds = true;
    last_heartbeat = last_poll = now;
    wake_event = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!wake_event)
        throw net::errno_error("cannot create an event descriptor", errno);
    thread = std::thread([this] { run(); });
}

ControlPlane::Impl::~Impl() {
    leave();
    {
        std::unique_lock lock(mutex);
        const auto end = Clock::now() + kFarewellTimeout;
        auto flushed = [&] {
            for (const Peer& peer : peers)
                if (peer.link.is_open() && peer.link.has_output())
                    return false;
            return true;
        };
        changed.wait_until(lock, end, flushed); // an abort that has not gone out yet
        stopping = true;
    }
    wake();
    thread.join();
}

void ControlPlane::Impl::wake() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_event.get(), &one, sizeof one);
}

void ControlPlane::Impl::run() {
    for (;;) {
        try {
            poll_once();
        } catch (const std::exception& error) { // out of memory, say: end the job, keep the thread
            const std::lock_guard lock(mutex);
            fail(Error(ErrorCode::Internal,
                       "rank " + std::to_string(rank) + ": control plane: " + error.what(), rank));
        }
        run_callbacks();
        const std::lock_guard lock(mutex);
        if (stopping)
            return;
    }
}

void ControlPlane::Impl::poll_once() {
    std::vector<pollfd> entries{{wake_event.get(), POLLIN, 0}};
    std::vector<int> rank_of_entry{-1};
    Milliseconds wait{};
    {
        const std::lock_guard lock(mutex);
        for (int peer = 0; peer < size; ++peer) {
            const ControlLink& link = peers[static_cast<std::size_t>(peer)].link;
            if (!link.is_open())
                continue;
            const int events = POLLIN | (link.has_output() ? POLLOUT : 0);
            entries.push_back({link.socket(), static_cast<short>(events), 0});
            rank_of_entry.push_back(peer);
        }
        const auto next = last_heartbeat + heartbeat_interval;
        wait = std::max(std::chrono::ceil<Milliseconds>(next - Clock::now()), Milliseconds{0});
    }
    ::poll(entries.data(), entries.size(), static_cast<int>(wait.count()));
    std::uint64_t count = 0;
    [[maybe_unused]] const ssize_t drained = ::read(wake_event.get(), &count, sizeof count);

    const std::lock_guard lock(mutex);
    // First everything that arrived, then the ends of connections: the reason of a failure must not
    // be overtaken by the silence it causes.
    std::vector<int> closed, damaged;
    for (std::size_t entry = 1; entry < entries.size(); ++entry) {
        const int peer = rank_of_entry[entry];
        ControlLink& link = peers[static_cast<std::size_t>(peer)].link;
        if (!link.is_open())
            continue;
        link.flush();
        if (!(entries[entry].revents & (POLLIN | POLLHUP | POLLERR)))
            continue;
        std::vector<Frame> frames;
        const ControlLink::State state = link.receive(frames);
        if (state != ControlLink::State::Open)
            (state == ControlLink::State::Closed ? closed : damaged).push_back(peer);
        peers[static_cast<std::size_t>(peer)].last_heard = Clock::now();
        for (Frame& frame : frames)
            handle(peer, std::move(frame));
    }
    for (const int peer : damaged)
        handle_damaged(peer);
    for (const int peer : closed)
        handle_closed(peer);
    check_heartbeats(Clock::now());
    changed.notify_all();
}

void ControlPlane::Impl::handle(int from, Frame frame) {
    if (peers[static_cast<std::size_t>(from)].state == PeerState::Lost)
        return; // it has come back too late
    switch (frame.kind) {
    case FrameKind::Heartbeat:
        break;
    case FrameKind::Message:
        inbox[{from, frame.tag}].push_back({std::move(frame.bytes), std::move(frame.fd)});
        break;
    case FrameKind::Goodbye:
        peers[static_cast<std::size_t>(from)].state = PeerState::Left;
        break;
    case FrameKind::Abort: {
        const Error error = decode_error(frame.bytes, from);
        // A rank that hears that it is lost says so as its own end.
        if (outlives_lost_ranks && error.code() == ErrorCode::PeerLost && error.rank() == from)
            lose(from, error);
        else
            fail(error);
        break;
    }
    }
}

void ControlPlane::Impl::handle_closed(int rank_closed) {
    Peer& peer = peers[static_cast<std::size_t>(rank_closed)];
    peer.link.close();
    if (peer.state != PeerState::Present || leaving)
        return;
    lose(rank_closed, Error(ErrorCode::PeerLost,
                            describe(rank_closed) + " died: its control connection to rank " +
                                std::to_string(rank) + " closed without a goodbye" + seen_when(),
                            rank_closed));
}

void ControlPlane::Impl::handle_damaged(int from) {
    Peer& peer = peers[static_cast<std::size_t>(from)];
    if (peer.state == PeerState::Present && !leaving) // before the link closes: the peer hears it
        lose(from, Error(ErrorCode::PeerLost,
                         "the control connection of " + describe(from) + " to rank " +
                             std::to_string(rank) +
                             " brought a frame with a wrong tag: it was damaged on the way, or "
                             "somebody tampers with it" +
                             seen_when(),
                         from));
    peer.link.close();
}

void ControlPlane::Impl::lose(int rank_lost, const Error& error) {
    Peer& peer = peers[static_cast<std::size_t>(rank_lost)];
    peer.state = PeerState::Lost;
    if (!outlives_lost_ranks) {
        fail(error);
        return;
    }
    peer.loss = error;
    num_lost.fetch_add(1, std::memory_order_release);
    if (peer.link.is_open()) { // it has stalled: should it go on, it hears that it is alone
        peer.link.queue(FrameKind::Abort, 0, encode_error(error));
        peer.link.flush();
    }
    changed.notify_all();
}

void ControlPlane::Impl::check_heartbeats(Clock::time_point now) {
    // If this process itself did not run (stopped, suspended, starved), its clocks prove nothing.
    const bool was_away = now - last_poll > heartbeat_interval + Milliseconds{1000};
    last_poll = now;
    const bool beat = now - last_heartbeat >= heartbeat_interval;
    if (beat)
        last_heartbeat = now;
    for (int r = 0; r < size; ++r) {
        Peer& peer = peers[static_cast<std::size_t>(r)];
        if (!peer.link.is_open())
            continue;
        if (was_away)
            peer.last_heard = now;
        if (beat && !leaving && !peer.link.has_output()) {
            peer.link.queue(FrameKind::Heartbeat, 0, {});
            peer.link.flush();
        }
        if (stall_timeout > Milliseconds{0} && peer.state == PeerState::Present && !leaving &&
            now - peer.last_heard > stall_timeout) {
            lose(r, Error(ErrorCode::PeerLost,
                          describe(r) + " stalled: no heartbeat for " +
                              std::to_string(stall_timeout.count()) +
                              " ms although its connection stands (stopped or starved process; "
                              "BELLOWS_STALL_SECONDS sets the limit)" +
                              seen_when(),
                          r));
        }
    }
}

void ControlPlane::Impl::run_callbacks() noexcept {
    if (!has_failed.load())
        return;
    const Error error = [&] {
        const std::lock_guard lock(mutex);
        return *failure;
    }();
    const std::lock_guard lock(callback_mutex);
    // A callback may add or remove others, so the search starts again after each.
    for (auto entry = callbacks.begin(); entry != callbacks.end();) {
        if (!entry->second.function) {
            ++entry;
            continue;
        }
        const auto function = std::exchange(entry->second.function, nullptr);
        try {
            function(error);
        } catch (...) { // the contract forbids it; nobody is left to tell
        }
        entry = callbacks.begin();
    }
}

void ControlPlane::Impl::leave() noexcept {
    try {
        std::unique_lock lock(mutex);
        if (leaving || failure)
            return;
        leaving = true;
        for (Peer& peer : peers) {
            peer.link.queue(FrameKind::Goodbye, 0, {});
            peer.link.flush();
        }
        wake();
        // A peer that reads the goodbye closes its end; then nothing of ours can be lost.
        const auto end = Clock::now() + kFarewellTimeout;
        changed.wait_until(lock, end, [&] {
            for (Peer& peer : peers)
                if (peer.link.is_open() && peer.link.has_output())
                    return false;
            return true;
        });
        for (Peer& peer : peers)
            peer.link.finish_output();
        changed.wait_until(lock, end, [&] {
            for (const Peer& peer : peers)
                if (peer.link.is_open())
                    return false;
            return true;
        });
    } catch (...) { // no memory for a goodbye: peers will see a closed connection
    }
}

} // namespace bellows
