// SPDX-License-Identifier: MIT

// Which queues a device gets, from the families of known devices.

#include "engine/runtime/queue_plan.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace bellows::detail {
namespace {

using Families = std::vector<VkQueueFamilyProperties>;

VkQueueFamilyProperties family(VkQueueFlags flags, std::uint32_t queues) {
    VkQueueFamilyProperties properties{};
    properties.queueFlags = flags;
    properties.queueCount = queues;
    return properties;
}

constexpr VkQueueFlags kAll = VK_QUEUE_GRAPHICS_BIT | VK_QUEUE_COMPUTE_BIT | VK_QUEUE_TRANSFER_BIT;
constexpr VkQueueFlags kCompute = VK_QUEUE_COMPUTE_BIT | VK_QUEUE_TRANSFER_BIT;

Families nvidia(std::uint32_t compute_queues) {
    return {family(kAll, 16), family(VK_QUEUE_TRANSFER_BIT, 2), family(kCompute, compute_queues)};
}

std::set<std::pair<std::uint32_t, std::uint32_t>> queues_of(const QueuePlan& plan) {
    std::set<std::pair<std::uint32_t, std::uint32_t>> queues;
    for (const QueuePlan::Slot& slot : plan.role)
        queues.insert({slot.family, slot.index});
    return queues;
}

void expect_within(const QueuePlan& plan, const Families& families) {
    for (const QueuePlan::Slot& slot : plan.role) {
        ASSERT_LT(slot.family, families.size());
        EXPECT_LT(slot.index, families[slot.family].queueCount);
    }
    for (std::size_t role = 0; role < kNumQueueRoles; ++role)
        if (takes_dispatches(static_cast<QueueRole>(role))) {
            EXPECT_TRUE(families[plan.role[role].family].queueFlags & VK_QUEUE_COMPUTE_BIT);
        }
}

TEST(QueuePlan, EightComputeQueuesNeedNoneWithGraphics) {
    const Families families = nvidia(8);
    const QueuePlan plan = plan_queues(families, false);
    expect_within(plan, families);
    EXPECT_TRUE(plan.no_graphics_queue(families));
    EXPECT_EQ(queues_of(plan).size(), 10u); // eight that compute, two that copy
    EXPECT_EQ(plan.of(QueueRole::AsyncCompute), plan.of(QueueRole::AsyncBackwardOut));
    EXPECT_EQ(plan.of(QueueRole::TransferIn).family, 1u);
}

TEST(QueuePlan, OneWithGraphicsIsTakenOnRequest) {
    const Families families = nvidia(8);
    const QueuePlan plan = plan_queues(families, true);
    expect_within(plan, families);
    EXPECT_FALSE(plan.no_graphics_queue(families));
    EXPECT_EQ(queues_of(plan).size(), 11u); // each role has its own
    EXPECT_EQ(plan.of(QueueRole::ComputeDeferred).family, 0u);
}

TEST(QueuePlan, SevenComputeQueuesTakeOneWithGraphics) {
    const Families families = nvidia(7);
    const QueuePlan plan = plan_queues(families, false);
    expect_within(plan, families);
    EXPECT_FALSE(plan.no_graphics_queue(families));
    EXPECT_EQ(plan.of(QueueRole::ComputeDeferred).family, 0u);
    EXPECT_EQ(plan.of(QueueRole::ComputeDeferredBeside), plan.of(QueueRole::ComputeDeferred));
    EXPECT_EQ(plan.of(QueueRole::Compute).family, 2u);
}

TEST(QueuePlan, FewComputeQueuesServeExchangesAlone) {
    const Families families = {family(kAll, 1), family(kCompute, 4),
                               family(VK_QUEUE_TRANSFER_BIT, 2)};
    const QueuePlan plan = plan_queues(families, false);
    expect_within(plan, families);
    EXPECT_EQ(plan.of(QueueRole::Compute), (QueuePlan::Slot{0, 0}));
    EXPECT_EQ(plan.of(QueueRole::ComputeDeferred), (QueuePlan::Slot{0, 0}));
    EXPECT_EQ(plan.of(QueueRole::AsyncForwardOut).family, 1u);
}

TEST(QueuePlan, WithoutAFamilyForCopiesTheyTakeTwoQueuesMore) {
    const Families eight = {family(kAll, 1), family(kCompute, 8)};
    EXPECT_FALSE(plan_queues(eight, false).no_graphics_queue(eight));
    const Families ten = {family(kAll, 1), family(kCompute, 10)};
    const QueuePlan plan = plan_queues(ten, false);
    expect_within(plan, ten);
    EXPECT_TRUE(plan.no_graphics_queue(ten));
    EXPECT_EQ(queues_of(plan).size(), 10u);
}

TEST(QueuePlan, ADeviceThatOnlyComputesHasNoneWithGraphics) {
    const Families families = {family(kCompute, 1)};
    const QueuePlan plan = plan_queues(families, false);
    expect_within(plan, families);
    EXPECT_TRUE(plan.no_graphics_queue(families));
    EXPECT_EQ(queues_of(plan).size(), 1u);
}

TEST(QueuePlan, OneQueueServesAllRoles) {
    const Families lavapipe = {family(kAll, 1)};
    for (const bool graphics : {false, true}) {
        const QueuePlan plan = plan_queues(lavapipe, graphics);
        expect_within(plan, lavapipe);
        EXPECT_FALSE(plan.no_graphics_queue(lavapipe));
        EXPECT_EQ(queues_of(plan).size(), 1u);
    }
}

} // namespace
} // namespace bellows::detail
