// SPDX-License-Identifier: MIT
#pragma once

// The ranks of a node whose devices copy straight from each other's memory. Each makes blocks of
// memory of its device, which are Vulkan buffers as well, and lets peers open them once; a peer
// that has been told where bytes stand copies them into memory of its own. Telling is the
// Transport's part. Any thread but for OpenedBlocks.

#include "link_driver.hpp"

#include <bellows/comm/message.hpp>
#include <bellows/engine/lane.hpp>
#include <bellows/engine/memory.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace bellows {

/// Blocks that are no more, for those that have them open.
class GoneBlocks {
public:
    void add(int peer, std::uint64_t id) noexcept;
    /// Those of a peer, once.
    std::vector<std::uint64_t> take(int peer);

private:
    std::mutex mutex_;
    std::map<int, std::vector<std::uint64_t>> ids_;
};

/// Memory of this rank's device that peers can be let into. It lasts while it is a buffer's, too.
class LinkBlock {
public:
    LinkBlock(LinkAllocation allocation, std::uint64_t id, std::shared_ptr<GoneBlocks> gone)
        : allocation_(std::move(allocation)), id_(id), gone_(std::move(gone)) {}
    ~LinkBlock();
    LinkBlock(const LinkBlock&) = delete;
    LinkBlock& operator=(const LinkBlock&) = delete;

    std::uint64_t bytes() const noexcept { return allocation_.memory->bytes(); }
    std::uint64_t address() const noexcept { return allocation_.memory->address(); }
    std::uint64_t id() const noexcept { return id_; }

    Buffer make_buffer(Device& device, std::string name,
                       MemoryCategory category = MemoryCategory::Communication) const;
    void bind(LaneContext& context, Buffer& buffer) const;

private:
    friend class DeviceLink;
    OpaqueMemory opaque() const noexcept { return {allocation_.file.get(), bytes()}; }

    LinkAllocation allocation_;
    std::uint64_t id_;
    std::shared_ptr<GoneBlocks> gone_;
    std::mutex mutex_;
    std::vector<int> passed_; ///< the ranks that it was passed to
};

/// Blocks of peers that are open here, by peer and id.
using OpenedBlocks = std::map<std::pair<int, std::uint64_t>, std::shared_ptr<LinkMemory>>;

class DeviceLink {
public:
    /// Collective over the world. driver: null keeps this rank out.
    DeviceLink(World& world, std::unique_ptr<LinkDriver> driver, std::chrono::milliseconds timeout);

    std::string_view name() const noexcept { return driver_->name(); }
    /// Each of the two copies from the other. Never of this rank itself.
    bool reaches(int peer) const noexcept { return reached_[static_cast<std::size_t>(peer)]; }
    bool reaches_any() const noexcept;
    /// Whether each of these ranks, this one among them, reaches all others. The same on all of
    /// them.
    bool connects(std::span<const int> ranks) const noexcept;

    /// gone: of all blocks that the same OpenedBlocks of peers remember. Throws
    /// Error{OutOfMemory}.
    std::shared_ptr<LinkBlock> allocate(std::uint64_t bytes, std::shared_ptr<GoneBlocks> gone);
    /// The memory of a block, of this link or another of this rank's, as one of this link's.
    std::shared_ptr<LinkBlock> share(const LinkBlock& block, std::shared_ptr<GoneBlocks> gone);
    /// Lets a peer open it, and says which it may close; does nothing the second time.
    void pass(int peer, LinkBlock& block) const;
    /// Opens what the peer has passed, unless `opened` has it, where it stays until the peer says,
    /// with the next one, that it is gone. Null: it has not come yet.
    std::shared_ptr<LinkMemory> open(int peer, std::uint64_t id, std::uint64_t bytes,
                                     OpenedBlocks& opened) const;
    std::unique_ptr<LinkCopy> copy_from(int peer, std::vector<LinkRange> ranges) const;

private:
    std::uint64_t tag_of(std::uint64_t id) const noexcept { return tags_ + id; }

    ControlPlane& control_;
    std::unique_ptr<LinkDriver> driver_;
    std::uint64_t tags_ = 0; ///< of the control plane, for descriptors of blocks
    std::vector<bool> reached_;
    std::map<int, std::vector<bool>> reached_by_; ///< what each of the node reaches
    std::atomic<std::uint64_t> last_id_{0};
};

/// The link that the options ask for; null, and why, where no peer is reached. Collective.
std::unique_ptr<DeviceLink> make_device_link(World& world, const TransportOptions& options,
                                             std::string& why_not);

} // namespace bellows
