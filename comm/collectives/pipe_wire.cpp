// SPDX-License-Identifier: MIT
#include "pipe_wire.hpp"

#include "transport/link_transfer.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace bellows {

using Clock = std::chrono::steady_clock;

PipeWire::PipeWire(Transport& transport, bool spares_cores,
                   std::function<void(const Error&)> on_error,
                   std::function<void(const PipeMessage&)> on_done)
    : transport_(transport), spares_cores_(spares_cores), on_error_(std::move(on_error)),
      on_done_(std::move(on_done)), thread_([this] { run(); }) {
}

PipeWire::~PipeWire() {
    stop(std::chrono::milliseconds{0});
}

void PipeWire::post(PipeMessagePtr message) {
    const std::scoped_lock lock(mutex_);
    if (stopping_)
        throw Error(ErrorCode::Aborted, "a message to or from rank " +
                                            std::to_string(message->peer) +
                                            " was given up: its pipe is gone");
    message->state = PipeMessage::State::Posted;
    inbox_.push_back(std::move(message));
    wake_.notify_one();
}

bool PipeWire::stopping() {
    const std::scoped_lock lock(mutex_);
    return stopping_;
}

void PipeWire::stop(std::chrono::milliseconds timeout) noexcept {
    {
        const std::scoped_lock lock(mutex_);
        if (!stopping_)
            stop_at_ = Clock::now() + timeout;
        stopping_ = true;
        wake_.notify_one();
    }
    if (thread_.joinable())
        thread_.join();
}

void PipeWire::fail(PipeMessage& message, const Error& error) {
    message.error = error;
    message.state.store(PipeMessage::State::Failed, std::memory_order_release);
    on_error_(error);
}

Transfer PipeWire::transfer_of(const PipeMessage& message) {
    const bool sends = message.direction == Direction::Send;
    if (message.block) {
        const std::vector<MemoryRun> runs{{message.first_byte, message.bytes}};
        const auto& block = message.block->block;
        return sends ? post_link_send(transport_, message.peer, message.tag, block, runs)
                     : post_link_recv(transport_, message.peer, message.tag, block, runs, opened_);
    }
    const auto bytes = message.bytes == 0
                           ? std::span<std::byte>{}
                           : message.staging.mapped_as<std::byte>().first(message.bytes);
    return sends ? transport_.post_send(message.peer, message.tag, bytes)
                 : transport_.post_recv(message.peer, message.tag, bytes);
}

void PipeWire::begin(PipeMessage& message) {
    try {
        message.transfer = transfer_of(message);
    } catch (const Error& error) {
        fail(message, error);
    }
}

/// True when the message needs no more attention.
bool PipeWire::look_after(PipeMessage& message) {
    if (message.state.load() == PipeMessage::State::Failed)
        return true;
    try {
        if (!message.transfer.test())
            return false;
        on_done_(message);
        message.state.store(PipeMessage::State::Done, std::memory_order_release);
    } catch (const Error& error) {
        message.transfer.cancel();
        fail(message, error);
    }
    return true;
}

bool PipeWire::sends_left() const {
    return std::any_of(active_.begin(), active_.end(), [](const PipeMessagePtr& message) {
        return message->direction == Direction::Send;
    });
}

void PipeWire::run() {
    const std::uint32_t short_naps = spares_cores_ ? 200 : UINT32_MAX;
    std::uint32_t idle_rounds = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        std::vector<PipeMessagePtr> fresh;
        fresh.swap(inbox_);
        const bool stopping = stopping_;
        lock.unlock();
        for (PipeMessagePtr& message : fresh) {
            begin(*message);
            active_.push_back(std::move(message));
        }
        const std::size_t ended = std::erase_if(
            active_, [this](const PipeMessagePtr& message) { return look_after(*message); });
        idle_rounds = ended > 0 || !fresh.empty() ? 0 : idle_rounds + 1;
        lock.lock();
        if (stopping && inbox_.empty() && (!sends_left() || Clock::now() > stop_at_))
            break;
        if (!inbox_.empty())
            continue;
        if (active_.empty()) {
            wake_.wait(lock, [this] { return stopping_ || !inbox_.empty(); });
        } else if (idle_rounds < 8) {
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        } else {
            // Naps leave the cores to those who work.
            wake_.wait_for(lock, std::chrono::microseconds(idle_rounds < short_naps ? 50 : 250));
        }
    }
    lock.unlock();
    for (const PipeMessagePtr& message : active_) {
        message->transfer.cancel();
        if (message->state.load() == PipeMessage::State::Posted) {
            message->error = Error(ErrorCode::Aborted, "a message to or from rank " +
                                                           std::to_string(message->peer) +
                                                           " was given up: its pipe is gone");
            message->state.store(PipeMessage::State::Failed, std::memory_order_release);
        }
    }
    active_.clear();
}

} // namespace bellows
