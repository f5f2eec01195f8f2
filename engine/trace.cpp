// SPDX-License-Identifier: MIT
#include "trace_impl.hpp"

#include "device_impl.hpp"
#include "recording_impl.hpp"

#include <chrono>
#include <utility>
#include <vector>

namespace bellows::detail {

Trace::Trace(Device::Impl& device) : device_(device) {
}

std::int64_t Trace::now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

VkQueryPool Trace::create_queries(std::uint32_t queue, std::uint32_t num_operations) const {
    if (device_.queues[queue]->timestamp_bits == 0 || num_operations == 0)
        return VK_NULL_HANDLE;
    VkQueryPoolCreateInfo info{};
    info.sType = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
    info.queryType = VK_QUERY_TYPE_TIMESTAMP;
    info.queryCount = 2 * num_operations;
    VkQueryPool pool = VK_NULL_HANDLE;
    check(device_.vk.vkCreateQueryPool(device_.device, &info, nullptr, &pool),
          "creating a query pool");
    return pool;
}

void Trace::calibrate(std::int64_t newest_device_ns) {
    // The newest timestamp of finished work lies just before the present: the smallest distance
    // ever seen is the best estimate of the clocks' offset.
    const std::int64_t offset = now_ns() - newest_device_ns;
    if (!calibrated_ || offset < offset_ns_)
        offset_ns_ = offset;
    calibrated_ = true;
}

void Trace::read_queries(const Recording::Impl& recording, std::uint32_t queue) {
    const auto count = static_cast<std::uint32_t>(recording.operations.size());
    if (recording.queries == VK_NULL_HANDLE || recording.num_queries != count)
        return;
    std::vector<std::uint64_t> ticks(2 * count);
    const VkResult result =
        device_.vk.vkGetQueryPoolResults(device_.device, recording.queries, 0, 2 * count,
                                         ticks.size() * 8, ticks.data(), 8, VK_QUERY_RESULT_64_BIT);
    if (result != VK_SUCCESS)
        return;
    const auto to_ns = [&](std::uint64_t tick) {
        return static_cast<std::int64_t>(static_cast<double>(tick) *
                                         device_.info.timestamp_period_ns);
    };
    calibrate(to_ns(ticks.back()));
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto& operation = recording.operations[i];
        const std::string& label = recording.labels[operation.label];
        events_.push_back({queue_lane(queue), operation.name,
                           label.empty() ? recording.name : label, to_ns(ticks[2 * i]),
                           to_ns(ticks[2 * i + 1])});
        device_event_.push_back(true);
    }
}

std::string Trace::queue_lane(std::uint32_t queue) const {
    std::string name;
    for (std::size_t role = 0; role < device_.queue_of_role.size(); ++role)
        if (device_.queue_of_role[role] == queue && name.empty())
            name = to_string(static_cast<QueueRole>(role));
    return name;
}

void Trace::add(TraceEvent event) {
    events_.push_back(std::move(event));
    device_event_.push_back(false);
}

std::vector<TraceEvent> Trace::take() {
    for (std::size_t i = 0; i < events_.size(); ++i)
        if (device_event_[i]) {
            events_[i].begin_ns += offset_ns_;
            events_[i].end_ns += offset_ns_;
        }
    device_event_.clear();
    return std::exchange(events_, {});
}

} // namespace bellows::detail
