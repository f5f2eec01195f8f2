// SPDX-License-Identifier: MIT
#pragma once

// The thread that moves a pipe's messages: it alone uses the transport. Messages are posted from
// any thread, are moved in any order, and tell by an atomic state when they are done. They go
// through the host's memory, or from device to device where the transport's link reaches the peer.

#include "transport/link_pool.hpp"

#include <bellows/comm/message.hpp>
#include <bellows/engine/memory.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace bellows {

struct PipeMessage {
    enum class State : std::uint8_t { New, Posted, Done, Failed };

    Direction direction = Direction::Send;
    int peer = -1;
    Tag tag;
    std::uint64_t bytes = 0;
    std::shared_ptr<const PooledBlock> block; ///< of a message between devices; else none
    std::uint64_t first_byte = 0;             ///< of the message in what is sent of the block
    Buffer staging; ///< whole words, of the block; bound before the message is posted
    std::atomic<State> state{State::New};
    std::optional<Error> error; ///< set before state becomes Failed
    Transfer transfer;          ///< the wire's thread only; gone before the staging
};

using PipeMessagePtr = std::shared_ptr<PipeMessage>;

class PipeWire {
public:
    /// spares_cores: they do the device's work, too. Both functions are called on the wire's
    /// thread. on_error: with what a transfer threw. on_done: with a message that has been moved.
    PipeWire(Transport& transport, bool spares_cores, std::function<void(const Error&)> on_error,
             std::function<void(const PipeMessage&)> on_done);
    ~PipeWire();

    /// Any thread. Throws Error{Aborted} after stop().
    void post(PipeMessagePtr message);
    /// Whether stop() was called. Any thread.
    bool stopping();
    /// Waits up to `timeout` for the sends, cancels the rest, ends the thread. Once.
    void stop(std::chrono::milliseconds timeout) noexcept;

private:
    void run();
    Transfer transfer_of(const PipeMessage& message);
    void begin(PipeMessage& message);
    bool look_after(PipeMessage& message);
    void fail(PipeMessage& message, const Error& error);
    bool sends_left() const;

    Transport& transport_;
    bool spares_cores_;
    std::function<void(const Error&)> on_error_;
    std::function<void(const PipeMessage&)> on_done_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<PipeMessagePtr> inbox_;
    bool stopping_ = false;
    std::chrono::steady_clock::time_point stop_at_{};
    std::vector<PipeMessagePtr> active_; ///< the wire's thread only
    OpenedBlocks opened_;                ///< that thread only, too
    std::thread thread_;
};

} // namespace bellows
