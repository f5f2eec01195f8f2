// SPDX-License-Identifier: MIT
#include <bellows/comm/message.hpp>

#include "device_link.hpp"
#include "world/deadline.hpp"
#include "world/fail_together.hpp"

#include <utility>

namespace bellows {

Transfer::Transfer(Direction direction, int peer, Tag tag, std::uint64_t expected_bytes,
                   std::unique_ptr<State> state) noexcept
    : direction_(direction), peer_(peer), tag_(tag), expected_bytes_(expected_bytes), done_(!state),
      state_(std::move(state)) {
}

Transfer::Transfer(Transfer&& other) noexcept
    : direction_(other.direction_), peer_(other.peer_), tag_(other.tag_),
      expected_bytes_(other.expected_bytes_), seen_bytes_(other.seen_bytes_),
      posted_(other.posted_), done_(std::exchange(other.done_, true)),
      state_(std::move(other.state_)) {
}

Transfer& Transfer::operator=(Transfer&& other) noexcept {
    if (this != &other) {
        cancel();
        direction_ = other.direction_;
        peer_ = other.peer_;
        tag_ = other.tag_;
        expected_bytes_ = other.expected_bytes_;
        seen_bytes_ = other.seen_bytes_;
        posted_ = other.posted_;
        done_ = std::exchange(other.done_, true);
        state_ = std::move(other.state_);
    }
    return *this;
}

Transfer::~Transfer() {
    cancel();
}

bool Transfer::test() {
    if (!done_ && state_->test()) {
        seen_bytes_ = state_->seen_bytes();
        done_ = true;
        if (state_->in_place().block.empty())
            state_.reset();
    }
    return done();
}

bool Transfer::cancel() noexcept {
    bool released = true;
    if (!done_) {
        seen_bytes_ = state_->seen_bytes();
        released = state_->cancel();
    }
    done_ = true;
    state_.reset();
    return released;
}

Transport::Transport(World& world) noexcept
    : control_(&world.control()), rank_(world.rank()), size_(world.size()) {
}

Transport::~Transport() = default;

std::string_view Transport::device_link_name() const noexcept {
    return device_link_ ? device_link_->name() : std::string_view();
}

void Transport::require(int peer, Tag tag) const {
    if (peer < 0 || peer >= size_)
        throw Error(ErrorCode::InvalidArgument, "rank " + std::to_string(peer) +
                                                    " does not exist: there are " +
                                                    std::to_string(size_) + " ranks");
    if (tag.stream >= Tag::kStreams)
        throw Error(ErrorCode::InvalidArgument, "stream " + std::to_string(tag.stream) +
                                                    " of a tag must be below " +
                                                    std::to_string(Tag::kStreams));
    control_->throw_if_failed();
}

bool Transport::reads_in_place(int) const noexcept {
    return false;
}

Transfer Transport::post_recv_in_place(int peer, Tag, std::uint64_t) {
    throw Error(ErrorCode::Unsupported, "messages from rank " + std::to_string(peer) +
                                            " cannot be received in place over " +
                                            std::string(name()));
}

SharedMemory Transport::share(std::uint64_t) {
    return {};
}

namespace {

void poll_all(Transport& transport, std::span<Transfer> transfers, std::string_view phase,
              std::chrono::milliseconds timeout) {
    const Deadline deadline(timeout);
    Backoff backoff;
    for (;;) {
        bool all_done = true;
        for (Transfer& transfer : transfers)
            all_done = transfer.test() && all_done;
        if (all_done)
            return;
        transport.control().throw_if_failed();
        if (deadline.expired())
            throw timeout_error(transport, transfers, phase, deadline.elapsed());
        transport.progress();
        backoff.pause();
    }
}

} // namespace

void wait_all(Transport& transport, std::span<Transfer> transfers, std::string_view phase,
              std::chrono::milliseconds timeout) {
    try {
        poll_all(transport, transfers, phase, timeout);
    } catch (const Error& error) {
        if (!transport.control().failed())
            throw;
        throw meanwhile(error, transport.rank(),
                        "'" + std::string(phase) + "', " + describe_transfers(transfers));
    }
}

std::string describe_transfers(std::span<const Transfer> transfers) {
    constexpr std::size_t kMost = 8;
    std::size_t open = 0;
    std::string text;
    for (const Transfer& transfer : transfers) {
        if (transfer.done() || ++open > kMost)
            continue;
        text += open == 1 ? ": " : "; ";
        text += transfer.direction() == Direction::Receive ? "from rank " : "to rank ";
        text += std::to_string(transfer.peer()) + " expected " +
                std::to_string(transfer.expected_bytes()) + " bytes, saw " +
                std::to_string(transfer.seen_bytes()) + " (exchange " +
                std::to_string(transfer.tag().sequence) + ", stream " +
                std::to_string(transfer.tag().stream) + ")";
    }
    if (open > kMost)
        text += "; and " + std::to_string(open - kMost) + " more";
    return std::to_string(transfers.size() - open) + " of " + std::to_string(transfers.size()) +
           " messages done" + text;
}

Error timeout_error(const Transport& transport, std::span<const Transfer> transfers,
                    std::string_view phase, std::chrono::milliseconds waited) {
    int first_peer = -1;
    for (const Transfer& transfer : transfers)
        if (!transfer.done() && first_peer < 0)
            first_peer = transfer.peer();
    return Error(ErrorCode::Timeout,
                 "rank " + std::to_string(transport.rank()) + " waited " +
                     std::to_string(waited.count()) + " ms in '" + std::string(phase) + "', " +
                     describe_transfers(transfers),
                 first_peer);
}

} // namespace bellows
