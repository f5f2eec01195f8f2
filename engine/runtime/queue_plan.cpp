// SPDX-License-Identifier: MIT
#include "queue_plan.hpp"

#include <algorithm>

namespace bellows::detail {

namespace {

constexpr std::uint32_t kNone = ~0u;

constexpr std::array kOfExchanges = {QueueRole::AsyncForwardOut, QueueRole::AsyncForwardIn,
                                     QueueRole::AsyncBackwardOut, QueueRole::AsyncBackwardIn};
constexpr std::array kOfCompute = {QueueRole::Compute, QueueRole::ComputeBeside,
                                   QueueRole::ComputeDeferred, QueueRole::ComputeDeferredBeside};

struct Families {
    std::uint32_t compute = kNone;  ///< the first that computes
    std::uint32_t beside = kNone;   ///< another without graphics, or the same
    std::uint32_t transfer = kNone; ///< one that only copies, or `beside`
};

Families choose_families(const std::vector<VkQueueFamilyProperties>& families) {
    Families chosen;
    for (std::uint32_t i = 0; i < families.size(); ++i) {
        const VkQueueFlags flags = families[i].queueFlags;
        if ((flags & VK_QUEUE_COMPUTE_BIT) && chosen.compute == kNone)
            chosen.compute = i;
        else if ((flags & VK_QUEUE_COMPUTE_BIT) && !(flags & VK_QUEUE_GRAPHICS_BIT) &&
                 chosen.beside == kNone)
            chosen.beside = i;
        constexpr VkQueueFlags kOther = VK_QUEUE_COMPUTE_BIT | VK_QUEUE_GRAPHICS_BIT |
                                        VK_QUEUE_VIDEO_DECODE_BIT_KHR |
                                        VK_QUEUE_VIDEO_ENCODE_BIT_KHR;
        if ((flags & VK_QUEUE_TRANSFER_BIT) && !(flags & kOther) && chosen.transfer == kNone)
            chosen.transfer = i;
    }
    if (chosen.beside == kNone)
        chosen.beside = chosen.compute;
    if (chosen.transfer == kNone)
        chosen.transfer = chosen.beside;
    return chosen;
}

/// Hands out the queues of a family as long as they last, and then the last one again.
class Queues {
public:
    explicit Queues(const std::vector<VkQueueFamilyProperties>& families)
        : families_(families), next_(families.size(), 0) {}

    QueuePlan::Slot take(std::uint32_t family) {
        const std::uint32_t last = families_[family].queueCount - 1;
        return {family, std::min(next_[family]++, last)};
    }

private:
    const std::vector<VkQueueFamilyProperties>& families_;
    std::vector<std::uint32_t> next_;
};

} // namespace

bool QueuePlan::no_graphics_queue(const std::vector<VkQueueFamilyProperties>& families) const {
    return std::none_of(role.begin(), role.end(), [&](const Slot& slot) {
        return families[slot.family].queueFlags & VK_QUEUE_GRAPHICS_BIT;
    });
}

QueuePlan plan_queues(const std::vector<VkQueueFamilyProperties>& families, bool graphics_queue) {
    const auto [compute, beside, copies] = choose_families(families);
    Queues queues(families);
    QueuePlan plan;
    const bool beside_graphics = (families[beside].queueFlags & VK_QUEUE_GRAPHICS_BIT) != 0;
    const std::size_t of_copies = copies == beside ? 2 : 0;
    const auto has = [&](std::size_t count) {
        return !beside_graphics && families[beside].queueCount >= count + of_copies;
    };
    // On NVIDIA a device that owns a queue with graphics has 48 KiB of shared memory for each
    // processor, on all its queues; one without has all of it, and twice the workgroups at once.
    if ((!graphics_queue || compute == beside) && has(kOfExchanges.size() + kOfCompute.size())) {
        plan.of(QueueRole::TransferIn) = queues.take(copies);
        plan.of(QueueRole::TransferOut) = queues.take(copies);
        for (const QueueRole role : kOfExchanges)
            plan.of(role) = queues.take(beside);
        for (const QueueRole role : kOfCompute)
            plan.of(role) = queues.take(beside);
        plan.of(QueueRole::AsyncCompute) = plan.of(QueueRole::AsyncBackwardOut);
        return plan;
    }
    // Kernels of a family without graphics follow one another sooner there, and those of its queues
    // and of one queue with graphics run at once; two queues with graphics take turns.
    const std::size_t needed = kOfExchanges.size() + 3;
    const bool apart = compute != beside && has(needed);
    if (!apart)
        for (const QueueRole role : kOfCompute)
            plan.of(role) =
                role == QueueRole::Compute ? queues.take(compute) : plan.of(QueueRole::Compute);
    plan.of(QueueRole::TransferIn) = queues.take(copies);
    plan.of(QueueRole::TransferOut) = queues.take(copies);
    plan.of(QueueRole::AsyncCompute) = queues.take(beside);
    for (const QueueRole role : kOfExchanges)
        plan.of(role) = queues.take(beside);
    if (apart) {
        plan.of(QueueRole::Compute) = queues.take(beside);
        plan.of(QueueRole::ComputeBeside) = queues.take(beside);
        plan.of(QueueRole::ComputeDeferred) = queues.take(compute);
        plan.of(QueueRole::ComputeDeferredBeside) =
            has(needed + 1) ? queues.take(beside) : plan.of(QueueRole::ComputeDeferred);
    }
    return plan;
}

} // namespace bellows::detail
