// SPDX-License-Identifier: MIT
#pragma once

// Command buffers of small recordings that are gone, each with its pool, for those to come: drivers
// take 20 to 100 us to make a pool, which is as long as a copy of some megabytes. Any thread.

#include "vulkan.hpp"

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace bellows::detail {

struct PooledCommands {
    VkCommandPool pool = VK_NULL_HANDLE; ///< of this one buffer
    VkCommandBuffer buffer = VK_NULL_HANDLE;
};

class SpareCommands {
public:
    /// Empty if there is none of the queue family.
    PooledCommands take(std::uint32_t family) {
        const std::scoped_lock lock(mutex_);
        std::vector<PooledCommands>& spare = of_family_[family];
        if (spare.empty())
            return {};
        const PooledCommands taken = spare.back();
        spare.pop_back();
        return taken;
    }
    /// False: there are enough, the caller keeps them.
    bool keep(std::uint32_t family, const PooledCommands& commands) {
        const std::scoped_lock lock(mutex_);
        std::vector<PooledCommands>& spare = of_family_[family];
        if (spare.size() >= kMost)
            return false;
        spare.push_back(commands);
        return true;
    }
    /// The pools of all, which are given up.
    std::vector<VkCommandPool> give_up() {
        const std::scoped_lock lock(mutex_);
        std::vector<VkCommandPool> pools;
        for (auto& [family, spare] : of_family_)
            for (const PooledCommands& commands : spare)
                pools.push_back(commands.pool);
        of_family_.clear();
        return pools;
    }

private:
    static constexpr std::size_t kMost = 256;
    std::mutex mutex_;
    std::map<std::uint32_t, std::vector<PooledCommands>> of_family_;
};

} // namespace bellows::detail
