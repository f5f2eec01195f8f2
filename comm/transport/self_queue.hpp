// SPDX-License-Identifier: MIT
#pragma once

// Messages of a rank to itself: a memory copy when the second half is posted. Belongs to one
// transport and its thread; transfers that outlive the queue's other half keep it alive.

#include <bellows/comm/message.hpp>

#include <deque>
#include <map>
#include <memory>

namespace bellows {

class SelfQueue {
public:
    explicit SelfQueue(int rank) : rank_(rank), pending_(std::make_shared<Pending>()) {}

    Transfer post_send(Tag tag, std::span<const std::byte> bytes);
    Transfer post_recv(Tag tag, std::span<std::byte> bytes);

private:
    struct Message {
        std::span<const std::byte> source;
        std::span<std::byte> target;
        Direction posted;
        bool matched = false;
        bool cancelled = false;
        std::uint64_t copied = 0;
        std::uint64_t expected = 0;
    };
    using Key = std::pair<std::uint64_t, std::uint32_t>;
    using Pending = std::map<Key, std::deque<std::shared_ptr<Message>>>;
    class SelfTransfer;

    Transfer post(Direction direction, Tag tag, std::span<const std::byte> source,
                  std::span<std::byte> target);

    int rank_;
    std::shared_ptr<Pending> pending_;
};

} // namespace bellows
