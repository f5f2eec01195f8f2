// SPDX-License-Identifier: MIT
#pragma once

// Memory of messages between devices, which come and go: blocks that are used again, since making
// one and letting a peer into it takes far longer than a message. Any thread.

#include "device_link.hpp"

#include <bellows/engine/device.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace bellows {

struct PooledBlock {
    std::shared_ptr<LinkBlock> block;
    Buffer memory; ///< the block, for buffers to be bound to
};

class LinkPool {
public:
    /// name: of the blocks in errors and the trace. All outlive it.
    LinkPool(Device& device, DeviceLink& link, std::string name)
        : device_(device), link_(link), name_(std::move(name)) {}

    /// At least so many bytes, which nobody else uses: a block is free when all that take() gave of
    /// it is gone, and nothing is bound to its memory. Throws Error{OutOfMemory}.
    std::shared_ptr<const PooledBlock> take(std::uint64_t bytes);

private:
    Device& device_;
    DeviceLink& link_;
    std::string name_;
    std::shared_ptr<GoneBlocks> gone_ = std::make_shared<GoneBlocks>();
    std::mutex mutex_;
    std::vector<std::shared_ptr<PooledBlock>> blocks_;
};

} // namespace bellows
