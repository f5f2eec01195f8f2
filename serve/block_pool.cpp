// SPDX-License-Identifier: MIT
#include <bellows/serve/block_pool.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/mix.hpp>
#include <bellows/engine/paged_attention.hpp>

#include <algorithm>
#include <ranges>
#include <string>
#include <unordered_set>

namespace bellows {

static_assert(kBlockTokens == ops::kCacheBlock);

namespace {

void require(bool holds, std::uint64_t block, const char* what) {
    if (!holds) {
        throw Error(ErrorCode::Internal, "cache block " + std::to_string(block) + " " + what);
    }
}

} // namespace

std::uint64_t BlockPool::default_hash(BlockContent before, std::span<const std::uint32_t> tokens) {
    auto hash = mix(static_cast<std::uint64_t>(before));
    for (const std::uint32_t token : tokens) {
        hash = mix(hash ^ token);
    }
    return hash;
}

BlockPool::BlockPool(std::uint64_t blocks, Hash hash) : hash_(hash) {
    if (blocks == 0 || blocks >= kNone) {
        throw Error(ErrorCode::InvalidArgument, "a cache has " + std::to_string(blocks) +
                                                    " blocks; accepted is 1 to " +
                                                    std::to_string(kNone - 1));
    }
    blocks_.resize(blocks);
    for (std::uint32_t block = 0; block < blocks; ++block) {
        link_after(last_, block);
    }
}

BlockPool::Block& BlockPool::at(std::uint32_t block) {
    require(block < blocks_.size(), block, "does not exist");
    return blocks_[block];
}

const BlockPool::Block& BlockPool::at(std::uint32_t block) const {
    require(block < blocks_.size(), block, "does not exist");
    return blocks_[block];
}

void BlockPool::link_after(std::uint32_t previous, std::uint32_t block) {
    Block& it = blocks_[block];
    it.previous = previous;
    it.next = previous == kNone ? first_ : blocks_[previous].next;
    (previous == kNone ? first_ : blocks_[previous].next) = block;
    (it.next == kNone ? last_ : blocks_[it.next].previous) = block;
    ++num_free_;
}

void BlockPool::unlink(std::uint32_t block) {
    Block& it = blocks_[block];
    (it.previous == kNone ? first_ : blocks_[it.previous].next) = it.next;
    (it.next == kNone ? last_ : blocks_[it.next].previous) = it.previous;
    it.previous = it.next = kNone;
    --num_free_;
}

void BlockPool::forget(Block& block) {
    if (block.content != BlockContent::Unknown) {
        by_hash_.erase(block.hash);
        block.content = BlockContent::Unknown;
    }
}

void BlockPool::forget(std::span<const std::uint32_t> blocks) {
    for (const std::uint32_t block : blocks) {
        forget(at(block));
    }
}

std::optional<std::uint32_t> BlockPool::allocate() {
    if (first_ == kNone) {
        return std::nullopt;
    }
    const std::uint32_t block = first_;
    unlink(block);
    Block& it = blocks_[block];
    evictions_ += it.content != BlockContent::Unknown;
    forget(it);
    it.holders = 1;
    return block;
}

bool BlockPool::holds(const Block& block, BlockContent before,
                      std::span<const std::uint32_t> tokens) const {
    return block.before == before && std::ranges::equal(block.tokens, tokens);
}

std::vector<std::uint32_t> BlockPool::find_prefix(std::span<const std::uint32_t> tokens,
                                                  std::uint64_t most) const {
    std::vector<std::uint32_t> found;
    auto before = BlockContent::Start;
    for (most = std::min(most, tokens.size() / kBlockTokens); found.size() < most;) {
        const auto part = tokens.subspan(found.size() * kBlockTokens, kBlockTokens);
        const auto it = by_hash_.find(hash_(before, part));
        if (it == by_hash_.end() || !holds(blocks_[it->second], before, part)) {
            break;
        }
        found.push_back(it->second);
        before = blocks_[it->second].content;
    }
    return found;
}

void BlockPool::take(std::span<const std::uint32_t> blocks) {
    for (const std::uint32_t block : blocks) {
        Block& it = at(block);
        require(it.content != BlockContent::Unknown, block, "is taken over, but holds no text");
        if (it.holders++ == 0) {
            unlink(block);
        }
    }
    hits_ += blocks.size();
}

void BlockPool::release(std::span<const std::uint32_t> blocks) {
    for (const std::uint32_t block : std::views::reverse(blocks)) {
        Block& it = at(block);
        require(it.holders > 0, block, "is released, but nobody holds it");
        if (--it.holders == 0) {
            link_after(it.content == BlockContent::Unknown ? kNone : last_, block);
        }
    }
}

BlockContent BlockPool::publish(std::uint32_t block, BlockContent before,
                                std::span<const std::uint32_t> tokens) {
    Block& it = at(block);
    require(it.holders > 0, block, "is published, but nobody holds it");
    require(it.content == BlockContent::Unknown, block, "is published twice");
    require(tokens.size() == kBlockTokens, block, "is published before it is full");
    if (before == BlockContent::Unknown) {
        return before;
    }
    const std::uint64_t hash = hash_(before, tokens);
    const auto [place, added] = by_hash_.try_emplace(hash, block);
    if (!added) {
        const Block& other = blocks_[place->second];
        return holds(other, before, tokens) ? other.content : BlockContent::Unknown;
    }
    it.content = BlockContent{next_content_++};
    it.before = before;
    it.hash = hash;
    std::ranges::copy(tokens, it.tokens.begin());
    return it.content;
}

BlockContent BlockPool::content(std::uint32_t block) const {
    return at(block).content;
}

bool BlockPool::held(std::uint32_t block) const {
    return at(block).holders > 0;
}

BlockPoolCounters BlockPool::counters() const {
    return {.blocks = blocks_.size(),
            .used = blocks_.size() - num_free_,
            .free = num_free_,
            .cached = by_hash_.size(),
            .hits = hits_,
            .evictions = evictions_};
}

void BlockPool::check(std::span<const std::span<const std::uint32_t>> tables) const {
    std::vector<std::uint64_t> holders(blocks_.size(), 0);
    for (const auto table : tables) {
        std::unordered_set<std::uint32_t> own;
        for (const std::uint32_t block : table) {
            require(block < blocks_.size(), block, "does not exist");
            require(own.insert(block).second, block, "stands twice in a table");
            ++holders[block];
        }
    }
    std::vector<bool> free(blocks_.size(), false);
    std::uint64_t num_free = 0;
    for (std::uint32_t block = first_, previous = kNone; block != kNone;
         previous = block, block = blocks_[block].next) {
        require(!free[block], block, "stands twice in the list of free blocks");
        require(blocks_[block].previous == previous, block, "is linked to the wrong block");
        free[block] = true;
        ++num_free;
    }
    std::uint64_t cached = 0;
    std::unordered_set<std::uint64_t> contents;
    for (std::uint64_t block = 0; block < blocks_.size(); ++block) {
        const Block& it = blocks_[block];
        require(it.holders == holders[block], block, "has another number of holders");
        require(free[block] == (it.holders == 0), block, "is both free and held, or neither");
        if (it.content == BlockContent::Unknown) {
            continue;
        }
        ++cached;
        require(contents.insert(static_cast<std::uint64_t>(it.content)).second, block,
                "has the content of another");
        require(hash_(it.before, it.tokens) == it.hash, block, "has a hash of other tokens");
        const auto place = by_hash_.find(it.hash);
        require(place != by_hash_.end() && place->second == block, block, "cannot be found");
    }
    if (num_free != num_free_ || cached != by_hash_.size()) {
        throw Error(ErrorCode::Internal,
                    "the cache's books say " + std::to_string(num_free_) + " free and " +
                        std::to_string(by_hash_.size()) + " cached blocks; there are " +
                        std::to_string(num_free) + " and " + std::to_string(cached));
    }
}

} // namespace bellows
