// SPDX-License-Identifier: MIT
#pragma once

// Memory that the ranks of a node share: each rank owns one anonymous segment (memfd, so neither
// /dev/shm nor its size matters and nothing is left behind), passes it to its peers over the
// control plane's sockets, and maps theirs. A segment is as large as the machine's memory, but only
// what is touched counts. Its head holds what the transport wants there; the rest is given out in
// blocks.

#include <bellows/comm/world.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

namespace bellows {

class NodeMemory {
public:
    /// Blocks begin at, and measure, multiples of it: devices import whole pages.
    static constexpr std::uint64_t kBlockBytes = std::uint64_t{64} << 10;

    struct Block {
        std::uint64_t offset = 0;
        std::uint64_t bytes = 0;
        std::uint64_t id = 0; ///< of this allocation, never used again
    };

    /// Collective over the world. offer: false keeps this rank out. A rank that cannot make or map
    /// a segment stays out, too; nothing fails but the control plane.
    NodeMemory(World& world, std::uint64_t head_bytes, bool offer,
               std::chrono::milliseconds timeout);
    ~NodeMemory();
    NodeMemory(const NodeMemory&) = delete;
    NodeMemory& operator=(const NodeMemory&) = delete;

    /// Both ranks have mapped the other's segment. Never of this rank itself.
    bool reaches(int peer) const noexcept;
    bool reaches_any() const noexcept;
    std::byte* mine() const noexcept { return mine_.base; }
    /// A peer's segment, of size_of(peer) bytes.
    std::byte* of(int peer) const noexcept { return segment(peer).base; }
    std::uint64_t size_of(int peer) const noexcept { return segment(peer).bytes; }

    /// Zero or old bytes. Any thread, as free() and holding(). Throws Error{OutOfMemory}.
    Block allocate(std::uint64_t bytes);
    void free(const Block& block) noexcept;
    /// The block in which all of these bytes lie.
    std::optional<Block> holding(std::span<const std::byte> bytes) const;

private:
    struct Segment {
        std::byte* base = nullptr;
        std::uint64_t bytes = 0;
        bool reached = false;
    };
    const Segment& segment(int peer) const noexcept {
        return peers_[static_cast<std::size_t>(peer)];
    }
    FileDescriptor create(std::uint64_t head_bytes);
    void trim(std::uint64_t offset, std::uint64_t bytes) noexcept;

    FileDescriptor file_;
    Segment mine_;
    std::vector<Segment> peers_; ///< by rank
    mutable std::mutex mutex_;   ///< of what follows
    std::map<std::uint64_t, Block> blocks_;
    std::map<std::uint64_t, std::uint64_t> free_; ///< offset to bytes, neighbours merged
    std::uint64_t used_bytes_ = 0;
    std::uint64_t kept_bytes_ = 0; ///< freed and not given back to the system, at most
    std::uint64_t last_id_ = 0;
};

} // namespace bellows
