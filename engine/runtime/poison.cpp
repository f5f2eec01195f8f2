// SPDX-License-Identifier: MIT
#include "poison.hpp"

#include "device_impl.hpp"

#include <utility>

namespace bellows::detail {

Poisoner::Poisoner(Device::Impl& device) : device_(device) {
    timeline_.semaphore = device.create_timeline();
    VkCommandPoolCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
    info.flags = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
    info.queueFamilyIndex = device.queues[device.queue_index(QueueRole::Compute)]->family;
    check(device.vk.vkCreateCommandPool(device.device, &info, nullptr, &pool_),
          "creating a command pool");
}

Poisoner::~Poisoner() {
    constexpr std::uint64_t kMostNs = 10'000'000'000;
    VkSemaphoreWaitInfo info{};
    info.sType = VK_STRUCTURE_TYPE_SEMAPHORE_WAIT_INFO;
    info.semaphoreCount = 1;
    info.pSemaphores = &timeline_.semaphore;
    info.pValues = &timeline_.last_value;
    device_.vk.vkWaitSemaphores(device_.device, &info, kMostNs); // what hangs is lost
    for (const Fill& fill : running_)
        fill.ticket->state.store(Ticket::State::Reached, std::memory_order_release);
    device_.vk.vkDestroyCommandPool(device_.device, pool_, nullptr);
    device_.vk.vkDestroySemaphore(device_.device, timeline_.semaphore, nullptr);
}

VkCommandBuffer Poisoner::new_commands() {
    if (!free_.empty()) {
        const VkCommandBuffer reused = free_.back();
        free_.pop_back();
        return reused;
    }
    VkCommandBufferAllocateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
    info.commandPool = pool_;
    info.level = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    info.commandBufferCount = 1;
    VkCommandBuffer commands = VK_NULL_HANDLE;
    check(device_.vk.vkAllocateCommandBuffers(device_.device, &info, &commands),
          "allocating a command buffer");
    return commands;
}

void Poisoner::record(VkCommandBuffer commands, VkBuffer buffer) const {
    VkCommandBufferBeginInfo begin{};
    begin.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
    begin.flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT;
    check(device_.vk.vkBeginCommandBuffer(commands, &begin), "recording a fill");
    // After fills of the same memory; the semaphore orders those who come after.
    VkMemoryBarrier2 barrier{};
    barrier.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER_2;
    barrier.srcStageMask = barrier.dstStageMask = VK_PIPELINE_STAGE_2_ALL_TRANSFER_BIT;
    barrier.srcAccessMask = barrier.dstAccessMask = VK_ACCESS_2_TRANSFER_WRITE_BIT;
    VkDependencyInfo dependency{};
    dependency.sType = VK_STRUCTURE_TYPE_DEPENDENCY_INFO;
    dependency.memoryBarrierCount = 1;
    dependency.pMemoryBarriers = &barrier;
    device_.vk.vkCmdPipelineBarrier2(commands, &dependency);
    device_.vk.vkCmdFillBuffer(commands, buffer, 0, VK_WHOLE_SIZE, kWord);
    check(device_.vk.vkEndCommandBuffer(commands), "recording a fill");
}

TicketPtr Poisoner::fill(VkBuffer buffer) {
    collect();
    if (device_.failure)
        return nullptr;
    Fill fill{new_commands(), device_.new_ticket("poisoning")};
    record(fill.commands, buffer);
    VkCommandBufferSubmitInfo commands{};
    commands.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_SUBMIT_INFO;
    commands.commandBuffer = fill.commands;
    VkSemaphoreSubmitInfo signal{};
    signal.sType = VK_STRUCTURE_TYPE_SEMAPHORE_SUBMIT_INFO;
    signal.semaphore = timeline_.semaphore;
    signal.value = timeline_.last_value + 1;
    signal.stageMask = VK_PIPELINE_STAGE_2_ALL_COMMANDS_BIT;
    VkSubmitInfo2 submit{};
    submit.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO_2;
    submit.commandBufferInfoCount = 1;
    submit.pCommandBufferInfos = &commands;
    submit.signalSemaphoreInfoCount = 1;
    submit.pSignalSemaphoreInfos = &signal;
    if (device_.lock_queues)
        device_.lock_queues();
    const VkResult result =
        device_.vk.vkQueueSubmit2(device_.queues[device_.queue_index(QueueRole::Compute)]->handle,
                                  1, &submit, VK_NULL_HANDLE);
    if (device_.unlock_queues)
        device_.unlock_queues();
    if (result != VK_SUCCESS) { // the next batch will say so
        free_.push_back(fill.commands);
        return nullptr;
    }
    timeline_.last_value = signal.value;
    fill.ticket->timeline = &timeline_;
    fill.ticket->value = signal.value;
    fill.ticket->state.store(Ticket::State::Submitted, std::memory_order_release);
    running_.push_back(fill);
    return fill.ticket;
}

void Poisoner::collect() {
    if (running_.empty())
        return;
    std::uint64_t value = 0;
    if (device_.vk.vkGetSemaphoreCounterValue(device_.device, timeline_.semaphore, &value) !=
        VK_SUCCESS)
        return;
    while (!running_.empty() && running_.front().ticket->value <= value) {
        running_.front().ticket->state.store(Ticket::State::Reached, std::memory_order_release);
        free_.push_back(running_.front().commands);
        running_.pop_front();
    }
}

} // namespace bellows::detail
