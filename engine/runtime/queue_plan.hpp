// SPDX-License-Identifier: MIT
#pragma once

// Which family and which of its queues serve each role. Plain data, any thread.

#include "vulkan.hpp"

#include <bellows/engine/recording.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace bellows::detail {

struct QueuePlan {
    struct Slot {
        std::uint32_t family = 0, index = 0;
        bool operator==(const Slot&) const = default;
    };
    std::array<Slot, kNumQueueRoles> role;

    const Slot& of(QueueRole r) const { return role[static_cast<std::size_t>(r)]; }
    Slot& of(QueueRole r) { return role[static_cast<std::size_t>(r)]; }
    /// Whether no queue of the plan is of a family with graphics.
    bool no_graphics_queue(const std::vector<VkQueueFamilyProperties>& families) const;
};

/// Transfers go to a family that only copies. Exchanges go to a compute family without graphics,
/// and what computes goes there, too, if that family has enough queues: with eight the plan takes
/// no queue with graphics at all, unless graphics_queue asks for one; with seven, one.
QueuePlan plan_queues(const std::vector<VkQueueFamilyProperties>& families, bool graphics_queue);

} // namespace bellows::detail
