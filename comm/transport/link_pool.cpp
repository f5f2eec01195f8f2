// SPDX-License-Identifier: MIT
#include "link_pool.hpp"

#include <algorithm>

namespace bellows {

std::shared_ptr<const PooledBlock> LinkPool::take(std::uint64_t bytes) {
    const std::scoped_lock lock(mutex_);
    const auto free = [](const std::shared_ptr<PooledBlock>& block) {
        return block.use_count() == 1 && !block->memory.lent();
    };
    std::shared_ptr<PooledBlock>* found = nullptr;
    for (std::shared_ptr<PooledBlock>& block : blocks_)
        if (block->block->bytes() >= bytes && free(block) &&
            (found == nullptr || block->block->bytes() < (*found)->block->bytes()))
            found = &block;
    if (found != nullptr)
        return *found;
    // Where messages have grown, the smaller ones' memory is not kept beside theirs.
    const auto small = std::find_if(blocks_.begin(), blocks_.end(), free);
    if (small != blocks_.end())
        blocks_.erase(small);
    auto made = std::make_shared<PooledBlock>();
    made->block = link_.allocate(bytes, gone_);
    made->memory = made->block->make_buffer(device_, name_);
    return blocks_.emplace_back(std::move(made));
}

} // namespace bellows
