// SPDX-License-Identifier: MIT
#pragma once

// The books of a paged cache: who uses which block, and which text a full block holds, so that a
// later request with the same beginning takes the block over instead of computing it anew. The
// memory itself belongs to the device; nothing here touches it. One thread at a time.

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

namespace bellows {

/// Tokens of a block: ops::kCacheBlock.
inline constexpr std::uint64_t kBlockTokens = 64;

/// Names a text of whole blocks. Two texts never have the same.
enum class BlockContent : std::uint64_t {
    Start = 0,                   ///< the empty text
    Unknown = ~std::uint64_t{0}, ///< a text that the pool does not keep
};

struct BlockPoolCounters {
    std::uint64_t blocks = 0;
    std::uint64_t used = 0;      ///< somebody holds them
    std::uint64_t free = 0;      ///< nobody holds them; some of these are cached
    std::uint64_t cached = 0;    ///< their text is known and may be taken over, used or free
    std::uint64_t hits = 0;      ///< blocks that were taken over, since the beginning
    std::uint64_t evictions = 0; ///< cached blocks that were given out for another text

    bool operator==(const BlockPoolCounters&) const = default;
};

class BlockPool {
public:
    /// Of the content before a block and the block's tokens. Equal hashes of different texts cost
    /// a block its reuse, nothing else.
    using Hash = std::uint64_t (*)(BlockContent before, std::span<const std::uint32_t> tokens);
    static std::uint64_t default_hash(BlockContent before, std::span<const std::uint32_t> tokens);

    /// Throws Error{InvalidArgument} for no blocks, or more than 2^32 − 2.
    explicit BlockPool(std::uint64_t blocks, Hash hash = default_hash);

    /// A block that nobody holds; the caller now does. Blocks without a known text go first, then
    /// those that were released longest ago. Nothing if all blocks are held.
    std::optional<std::uint32_t> allocate();
    /// The blocks that hold the longest known beginning of `tokens` in whole blocks, at most `most`
    /// of them. They are not taken: another call but take() may give them away.
    std::vector<std::uint32_t> find_prefix(std::span<const std::uint32_t> tokens,
                                           std::uint64_t most) const;
    /// Holds found blocks once more.
    void take(std::span<const std::uint32_t> blocks);
    /// Gives up one hold of each block, the last block first: ends of texts are evicted before
    /// their beginnings.
    void release(std::span<const std::uint32_t> blocks);

    /// Says that a held block is computed and which kBlockTokens tokens it holds, after which
    /// content. The result is what the next block of the text comes after. A text that is known
    /// from another block keeps that one. After Unknown everything is Unknown.
    BlockContent publish(std::uint32_t block, BlockContent before,
                         std::span<const std::uint32_t> tokens);
    /// What stands in a block that find_prefix() gave.
    BlockContent content(std::uint32_t block) const;

    /// The text of these blocks is not taken over any more.
    void forget(std::span<const std::uint32_t> blocks);

    bool held(std::uint32_t block) const;
    std::uint64_t num_free() const noexcept { return num_free_; }
    BlockPoolCounters counters() const;

    /// Counts everything again. tables: the blocks of everyone who holds some. Throws
    /// Error{Internal} that says what does not agree. For tests: it reads all blocks.
    void check(std::span<const std::span<const std::uint32_t>> tables) const;

private:
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;
    struct Block {
        std::uint64_t holders = 0;
        BlockContent content = BlockContent::Unknown; ///< known: it stands in by_hash_
        BlockContent before = BlockContent::Start;
        std::uint64_t hash = 0;
        std::uint32_t previous = kNone, next = kNone; ///< in the list of free blocks
        std::array<std::uint32_t, kBlockTokens> tokens{};
    };

    Block& at(std::uint32_t block);
    const Block& at(std::uint32_t block) const;
    bool holds(const Block& block, BlockContent before,
               std::span<const std::uint32_t> tokens) const;
    void forget(Block& block);
    void unlink(std::uint32_t block);
    void link_after(std::uint32_t previous, std::uint32_t block); ///< kNone: as the first

    Hash hash_;
    std::vector<Block> blocks_;
    std::uint32_t first_ = kNone, last_ = kNone; ///< free blocks, the next to be given out first
    std::uint64_t num_free_ = 0;
    std::uint64_t next_content_ = 1;
    std::uint64_t hits_ = 0, evictions_ = 0;
    std::unordered_map<std::uint64_t, std::uint32_t> by_hash_;
};

} // namespace bellows
