// SPDX-License-Identifier: MIT
#pragma once

// Messages from device to device, as Transfers. The source says in which block of its memory the
// bytes stand; the destination copies them to where they belong, and says that it has. The stream
// of a tag is below Tag::kStreams / 2: the answers take the other half.

#include "device_link.hpp"

#include <bellows/comm/message.hpp>
#include <bellows/engine/device.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace bellows {

/// The role of copies within the device. Copy engines, which reach the host, move what stays on it
/// at a tenth of what it can; but a queue that computes, too, would let them wait.
inline QueueRole role_within(const Device& device, QueueRole otherwise) noexcept {
    return device.distinct_queues(QueueRole::AsyncCompute, QueueRole::Compute)
               ? QueueRole::AsyncCompute
               : otherwise;
}

/// The role of copies between a tensor and where its messages leave from or arrive.
inline QueueRole role_of_copies(const Device& device, bool linked, QueueRole to_host) noexcept {
    return linked ? role_within(device, to_host) : to_host;
}

/// A part of a block.
struct MemoryRun {
    std::uint64_t offset = 0, bytes = 0;
};

inline std::uint64_t total_bytes(const std::vector<MemoryRun>& runs) noexcept {
    std::uint64_t bytes = 0;
    for (const MemoryRun& run : runs)
        bytes += run.bytes;
    return bytes;
}

/// transport.device_link() reaches the peer, which posts as many runs of the same bytes. Done when
/// the peer has them. Throw as Transport::post_send().
Transfer post_link_send(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> from,
                        const std::vector<MemoryRun>& runs);
/// opened: by the same GoneBlocks at the peer as its block; it outlives the transfer. on_copy: is
/// told when the copy has been handed to the driver.
Transfer post_link_recv(Transport& transport, int peer, Tag tag, std::shared_ptr<LinkBlock> to,
                        std::vector<MemoryRun> runs, OpenedBlocks& opened,
                        std::function<void()> on_copy = nullptr);

} // namespace bellows
