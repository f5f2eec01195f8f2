// SPDX-License-Identifier: MIT
#pragma once

// How two ranks show each other, over a connection that has just been made, that they know the
// job's key: the connecting one with introduce(), the other one in its Reception, which listens to
// any number of callers at once, so that those who say nothing hold nobody up.

#include "control_link.hpp"
#include "deadline.hpp"

#include <cstdint>
#include <functional>
#include <list>
#include <optional>
#include <vector>

namespace bellows {

/// The connecting side, rank `from`, to rank `to`. Nothing if the other end is no such rank of this
/// job or takes longer than some seconds.
std::optional<FrameKey> introduce(int socket, const SipKey& key, int from, int to);

struct Caller {
    FileDescriptor socket;
    bool is_unix = false;
};

class Reception {
public:
    using Welcome = std::function<void(int rank, Caller caller, const FrameKey& key)>;

    Reception(const SipKey& key, int self, int size);
    ~Reception();
    Reception(const Reception&) = delete;
    Reception& operator=(const Reception&) = delete;

    /// Listens for at most `time`, or until something comes, and calls `welcome` for each rank
    /// above this one that has introduced itself. A listener may be -1. Callers that say nothing
    /// right are sent away; those who take long, after some seconds, or sooner if there are many:
    /// the oldest go first. Throws Error{Io} if no descriptor is left.
    void serve(int unix_listener, int tcp_listener, Milliseconds time, const Welcome& welcome);

private:
    struct Pending;

    void accept_all(int listener, bool is_unix);
    bool advance(Pending& pending, const Welcome& welcome);

    SipKey key_;
    int self_;
    int size_;
    std::size_t most_;           ///< that wait at once
    std::list<Pending> pending_; ///< oldest first
};

} // namespace bellows
