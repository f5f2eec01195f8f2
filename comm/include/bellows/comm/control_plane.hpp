// SPDX-License-Identifier: MIT
#pragma once

// The ranks' own small socket mesh: it notices dead and stalled peers, spreads an abort to
// everyone, passes file descriptors and small messages, and works without MPI's progress, so that
// every wait elsewhere can be ended. Owned by World. All functions may be called from any thread;
// barrier() and agree() are collective: every rank calls them in the same order, one at a time. One
// background thread per rank does the reading, the heartbeats and the callbacks.

#include <bellows/base/error.hpp>
#include <bellows/comm/file_descriptor.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

struct ControlOptions {
    std::chrono::milliseconds heartbeat_interval{200};
    /// Silence after which a peer whose connection still stands is lost as stalled. 0: never, for
    /// debuggers. Unset: BELLOWS_STALL_SECONDS from the environment, else 15 s.
    std::optional<std::chrono::milliseconds> stall_timeout;
    std::chrono::milliseconds setup_timeout{60'000};
    /// A peer that is lost does not end the job: what needs it throws Error{PeerLost}, low-latency
    /// exchanges go on without it (ExpertExchange::mask_rank), and the world is closed without a
    /// barrier. The same on every rank. mpirun must leave the others alone (launch_ranks does so
    /// for LaunchOptions::grace).
    bool outlive_lost_ranks = false;
    /// Connect over TCP even inside a node (tests; file descriptors cannot be passed then).
    bool force_tcp = false;
};

/// Order in which agree() prefers errors: consequences (Aborted, Timeout) below causes.
int severity(ErrorCode code) noexcept;

class ControlPlane {
public:
    using Milliseconds = std::chrono::milliseconds;
    /// Collective exchange of set-up data: given this rank's bytes, returns every rank's, by rank.
    using AllGather = std::function<std::vector<std::string>(const std::string&)>;

    /// Messages are for small things; larger ones throw Error{InvalidArgument}.
    static constexpr std::uint64_t kMaxMessageBytes = 16u << 20;

    /// Collective. Connects all ranks with each other and starts the background thread.
    /// Throws Error{Timeout} naming the peer that did not answer, Error{Io} if a socket fails.
    ControlPlane(int rank, int size, const ControlOptions& options, const AllGather& all_gather);
    /// Says goodbye unless the job failed; ends within about two seconds.
    ~ControlPlane();
    ControlPlane(const ControlPlane&) = delete;
    ControlPlane& operator=(const ControlPlane&) = delete;

    int rank() const noexcept;
    int size() const noexcept;

    /// Ends the job for all ranks: the first error any rank reports becomes failure() everywhere,
    /// with this rank named if the error names none. Returns at once; later calls change nothing.
    void abort(const Error& error) noexcept;
    /// What ended the job, if anything did.
    std::optional<Error> failure() const;
    /// Cheap: one atomic load.
    bool failed() const noexcept;
    /// Throws failure() if there is one.
    void throw_if_failed() const;
    /// ControlOptions::outlive_lost_ranks.
    bool outlives_lost_ranks() const noexcept;
    /// With ControlOptions::outlive_lost_ranks: the peers that have died or stalled, for good.
    bool lost(int peer) const noexcept;
    bool any_lost() const noexcept;
    /// Throws the Error{PeerLost} that says how, if it is one.
    void throw_if_lost(int peer) const;
    /// Calls act(), which deals with that peer. False where it throws Error{PeerLost} and the peer
    /// is lost; other errors pass.
    bool unless_lost(int peer, const std::function<void()>& act) const;
    /// The lowest rank that is not lost.
    int first_living() const noexcept;

    /// Keeps a callback registered; destroying it waits until a running callback has returned
    /// (unless the callback itself destroys it).
    class Subscription {
    public:
        Subscription() noexcept = default;
        Subscription(Subscription&& other) noexcept;
        Subscription& operator=(Subscription&& other) noexcept;
        ~Subscription();
        void reset() noexcept;

    private:
        friend class ControlPlane;
        ControlPlane* owner_ = nullptr;
        std::uint64_t id_ = 0;
    };
    /// callback runs once, on the background thread, when the job fails (soon, if it already has).
    /// It must not block and must not throw. The subscription must not outlive the control plane.
    [[nodiscard]] Subscription on_failure(std::function<void(const Error&)> callback);

    /// Something that this rank is in the middle of, for as long as it lives.
    class Activity {
    public:
        Activity() noexcept = default;
        Activity(Activity&& other) noexcept;
        Activity& operator=(Activity&& other) noexcept;
        ~Activity();
        /// Waits until a running description has returned.
        void end() noexcept;

    private:
        friend class ControlPlane;
        ControlPlane* owner_ = nullptr;
        std::uint64_t id_ = 0;
    };
    /// describe: what goes on and how far it is, e.g. "'experts DISPATCH(F): records', ...". Called
    /// from any thread, by with_activities(); it must be quick and must neither call the control
    /// plane nor throw. The activity must not outlive the control plane.
    [[nodiscard]] Activity begin_activity(std::function<std::string()> describe);
    /// error, and behind it what this rank is in the middle of, oldest first; for errors that come
    /// from elsewhere, which cannot know it. An error that says it already comes back unchanged.
    Error with_activities(const Error& error) const;

    /// What this rank does from here on; World::enter_phase() does.
    void enter_phase(std::string phase);

    /// Queues a message and returns; to may be this rank. Messages between two ranks with one tag
    /// arrive in order. tag < 2^63. Throws failure(), or Error{PeerLost} if the peer has left.
    void send(int to, std::uint64_t tag, std::span<const std::byte> bytes);
    /// Throws Error{Timeout} after timeout, failure() as soon as the job fails, Error{PeerLost}
    /// when the peer has left without sending it.
    std::vector<std::byte> recv(int from, std::uint64_t tag, Milliseconds timeout);

    /// Whether file descriptors can be passed: both ranks on one host and network namespace.
    bool can_pass_fds(int peer) const;
    /// Sends a duplicate; the caller keeps fd. Throws Error{Unsupported} unless can_pass_fds(to).
    void send_fd(int to, std::uint64_t tag, int fd);
    FileDescriptor recv_fd(int from, std::uint64_t tag, Milliseconds timeout);
    /// The same without waiting: nothing while it has not come. Throws failure().
    std::optional<FileDescriptor> try_recv_fd(int from, std::uint64_t tag);

    /// Collective. Returns when every rank has come. Error{Timeout} names the ranks that have not;
    /// it comes at most half a second after the timeout.
    void barrier(Milliseconds timeout, std::string_view name = "barrier");
    /// Collective. The worst error that any rank brought (see severity(); ties: lowest rank), the
    /// same on every rank, with the rank that brought it unless it names another; nothing if none
    /// did.
    std::optional<Error> agree(const std::optional<Error>& mine, Milliseconds timeout,
                               std::string_view name = "agreement");

    /// Process id of a peer as that peer's own host counts it.
    std::int64_t peer_pid(int peer) const;
    /// Says goodbye: peers no longer expect this rank. Idempotent; sends nothing after a failure.
    void leave() noexcept;

private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

} // namespace bellows
