// SPDX-License-Identifier: MIT
#include "self_queue.hpp"

#include <algorithm>
#include <cstring>

namespace bellows {

// Each half of a message holds the whole; it is done once both halves are there.
class SelfQueue::SelfTransfer final : public Transfer::State {
public:
    SelfTransfer(int rank, std::shared_ptr<Message> message)
        : rank_(rank), message_(std::move(message)) {}

    bool test() override {
        if (message_->matched && message_->source.size() != message_->target.size())
            throw Error(ErrorCode::Corrupt,
                        "rank " + std::to_string(rank_) + " sent itself " +
                            std::to_string(message_->source.size()) + " bytes but expected " +
                            std::to_string(message_->target.size()),
                        rank_);
        return message_->matched;
    }

    bool cancel() noexcept override {
        message_->cancelled = true;
        return true;
    }

    std::uint64_t seen_bytes() const noexcept override { return message_->copied; }

private:
    int rank_;
    std::shared_ptr<Message> message_;
};

Transfer SelfQueue::post_send(Tag tag, std::span<const std::byte> bytes) {
    return post(Direction::Send, tag, bytes, {});
}

Transfer SelfQueue::post_recv(Tag tag, std::span<std::byte> bytes) {
    return post(Direction::Receive, tag, {}, bytes);
}

Transfer SelfQueue::post(Direction direction, Tag tag, std::span<const std::byte> source,
                         std::span<std::byte> target) {
    const Key key{tag.sequence, tag.stream};
    auto& queue = (*pending_)[key];
    while (!queue.empty() && queue.front()->cancelled)
        queue.pop_front();

    std::shared_ptr<Message> message;
    if (queue.empty() || queue.front()->posted == direction) {
        message = std::make_shared<Message>(Message{source, target, direction});
        queue.push_back(message);
    } else {
        message = queue.front();
        queue.pop_front();
        if (direction == Direction::Send)
            message->source = source;
        else
            message->target = target;
        message->matched = true;
        message->copied = std::min(message->source.size(), message->target.size());
        if (message->copied > 0)
            std::memcpy(message->target.data(), message->source.data(), message->copied);
    }
    if (queue.empty())
        pending_->erase(key);
    return Transfer(direction, rank_, tag,
                    direction == Direction::Send ? source.size() : target.size(),
                    std::make_unique<SelfTransfer>(rank_, std::move(message)));
}

} // namespace bellows
