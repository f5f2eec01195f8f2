// SPDX-License-Identifier: MIT
#pragma once

// State of the control plane behind ControlPlane. `mutex` guards everything but the callbacks,
// which have their own (taken before `mutex`, never after), so that a callback may ask the control
// plane.

#include "control_link.hpp"
#include "deadline.hpp"

#include <bellows/comm/control_plane.hpp>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace bellows {

struct ControlPlane::Impl {
    enum class PeerState { Present, Left, Lost };

    struct Peer {
        ControlLink link;
        bool passes_fds = false;
        std::int64_t pid = 0;
        std::string host;
        PeerState state = PeerState::Present;
        Clock::time_point last_heard;
        std::optional<Error> loss{}; ///< how it was lost, where that does not end the job
    };

    struct Message {
        std::vector<std::byte> bytes;
        FileDescriptor fd;
    };

    struct Callback {
        std::function<void(const Error&)> function; ///< empty once it has run
    };

    Impl(int rank, int size, const ControlOptions& options, const AllGather& all_gather);
    ~Impl();

    // Any thread, without `mutex`.
    void abort(const Error& error);
    void send(int to, std::uint64_t tag, std::span<const std::byte> bytes, FileDescriptor fd);
    Message receive(int from, std::uint64_t tag, Milliseconds timeout);
    /// receive(), whose failure of the job says what was waited for.
    Message receive_or_tell(int from, std::uint64_t tag, Milliseconds timeout);
    void leave() noexcept;
    void wake() noexcept;

    // With `mutex` held.
    void fail(const Error& error);
    /// A peer has died or stalled.
    void lose(int peer, const Error& error);
    /// What has come, if anything has.
    std::optional<Message> take(int from, std::uint64_t tag);
    void require_peer(int peer) const;
    void require_active() const;
    [[noreturn]] void throw_peer_gone(int peer) const;
    std::string describe(int peer) const;
    /// " (rank 0 saw it in step 12)", or nothing.
    std::string seen_when() const;
    void handle(int from, Frame frame);
    void handle_closed(int peer);
    void handle_damaged(int peer);
    void check_heartbeats(Clock::time_point now);

    // The background thread.
    void run();
    void poll_once();
    void run_callbacks() noexcept;

    const int rank;
    const int size;
    const Milliseconds heartbeat_interval;
    const Milliseconds stall_timeout;
    const bool outlives_lost_ranks;

    mutable std::mutex mutex;
    std::condition_variable changed;
    std::vector<Peer> peers;
    std::map<std::pair<int, std::uint64_t>, std::deque<Message>> inbox;
    std::optional<Error> failure;
    std::string phase; ///< what this rank does
    std::atomic<bool> has_failed{false};
    std::atomic<int> num_lost{0}; ///< of peers with a loss
    bool leaving = false;
    bool stopping = false;
    Clock::time_point last_heartbeat;
    Clock::time_point last_poll;

    std::recursive_mutex callback_mutex;
    std::map<std::uint64_t, Callback> callbacks;
    std::uint64_t next_callback = 1;

    mutable std::mutex activity_mutex; ///< held while describing; nothing is locked under it here
    std::map<std::uint64_t, std::function<std::string()>> activities;
    std::uint64_t next_activity = 1;

    std::mutex collective_mutex;
    std::uint64_t collective_sequence = 0;

    FileDescriptor wake_event;
    std::thread thread; ///< last: it uses everything above
};

/// An error as bytes, for Abort frames and agreements. decode throws Error{Corrupt} on nonsense.
std::vector<std::byte> encode_error(const Error& error);
Error decode_error(std::span<const std::byte> bytes, int from);

} // namespace bellows
