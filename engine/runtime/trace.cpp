// SPDX-License-Identifier: MIT
#include "trace_impl.hpp"

#include "device_impl.hpp"
#include "recording_impl.hpp"

#include <algorithm>
#include <chrono>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace bellows::detail {

Trace::Trace(Device::Impl& device) : device_(device) {
    if (device.self.has_feature("calibrated_timestamps"))
        read_clocks_ = device.vk.vkGetCalibratedTimestampsKHR != nullptr
                           ? device.vk.vkGetCalibratedTimestampsKHR
                           : device.vk.vkGetCalibratedTimestampsEXT;
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

std::int64_t Trace::to_ns(std::uint64_t ticks) const {
    // 64 bits of mantissa: ticks may count from 1970.
    return static_cast<std::int64_t>(static_cast<long double>(ticks) *
                                     static_cast<long double>(device_.info.timestamp_period_ns));
}

void Trace::calibrate(std::int64_t now) {
    // Clocks drift by some 10 ns in a millisecond; a reading costs microseconds.
    constexpr std::int64_t kEvery = 10'000'000;
    if (read_clocks_ == nullptr || (clock_.known() && now - calibrated_at_ns_ < kEvery))
        return;
    VkCalibratedTimestampInfoKHR infos[2]{};
    infos[0].sType = infos[1].sType = VK_STRUCTURE_TYPE_CALIBRATED_TIMESTAMP_INFO_KHR;
    infos[0].timeDomain = VK_TIME_DOMAIN_DEVICE_KHR;
    infos[1].timeDomain = VK_TIME_DOMAIN_CLOCK_MONOTONIC_KHR;
    std::uint64_t values[2]{}, deviation = 0;
    if (read_clocks_(device_.device, 2, infos, values, &deviation) != VK_SUCCESS) {
        read_clocks_ = nullptr; // bracket from now on
        return;
    }
    clock_.read_together(to_ns(values[0]), static_cast<std::int64_t>(values[1]));
    calibrated_at_ns_ = now;
}

bool Trace::read_queries(const Recording::Impl& recording, const Ticket& ticket,
                         std::uint32_t queue, std::int64_t submitted_ns) {
    const auto count = static_cast<std::uint32_t>(recording.operations.size());
    if (recording.queries == VK_NULL_HANDLE || recording.num_queries != count)
        return false;
    std::vector<std::uint64_t> ticks(2 * count);
    const VkResult result =
        device_.vk.vkGetQueryPoolResults(device_.device, recording.queries, 0, 2 * count,
                                         ticks.size() * 8, ticks.data(), 8, VK_QUERY_RESULT_64_BIT);
    if (result != VK_SUCCESS)
        return false;
    const std::uint32_t bits = device_.queues[queue]->timestamp_bits;
    const std::uint64_t mask = bits >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
    for (std::uint64_t& tick : ticks)
        tick &= mask;
    const std::int64_t now = now_ns();
    calibrate(now);
    if (!calibrated())
        clock_.bracket(to_ns(ticks.front()), to_ns(ticks.back()), submitted_ns, now);
    for (std::uint32_t i = 0; i < count; ++i) {
        const auto& operation = recording.operations[i];
        const std::string& label = recording.labels[operation.label];
        in_device_time_.push_back(events_.size());
        events_.push_back({queue_lane(queue), operation.name,
                           label.empty() ? recording.name : label, to_ns(ticks[2 * i]),
                           to_ns(ticks[2 * i + 1]), ticket.op, ticket.by});
    }
    if (calibrated())
        place_events(); // while the calibration is fresh
    return true;
}

void Trace::batch_done(const Recording::Impl& recording, const Ticket& ticket, std::uint32_t queue,
                       std::int64_t submitted_ns) {
    if (recording.operations.empty() || read_queries(recording, ticket, queue, submitted_ns))
        return;
    add({queue_lane(queue), recording.name, recording.name, submitted_ns, now_ns(), ticket.op,
         ticket.by});
}

void Trace::place_events() {
    for (const std::size_t i : in_device_time_) {
        events_[i].begin_ns += clock_.offset_ns();
        events_[i].end_ns += clock_.offset_ns();
    }
    in_device_time_.clear();
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
}

void Trace::add_beside(TraceEvent event) {
    beside_.push_back(std::move(event));
}

void Trace::spread_over_lanes() {
    std::sort(beside_.begin(), beside_.end(), [](const TraceEvent& a, const TraceEvent& b) {
        return std::tie(a.begin_ns, a.end_ns) < std::tie(b.begin_ns, b.end_ns);
    });
    std::map<std::string, std::vector<std::int64_t>> free_at; // per name: when each lane is free
    for (TraceEvent& event : beside_) {
        std::vector<std::int64_t>& ends = free_at[event.lane];
        auto lane = std::find_if(ends.begin(), ends.end(),
                                 [&](std::int64_t end) { return end <= event.begin_ns; });
        if (lane == ends.end())
            lane = ends.insert(ends.end(), 0);
        *lane = event.end_ns;
        if (lane != ends.begin())
            event.lane += " (" + std::to_string(lane - ends.begin() + 1) + ")";
        events_.push_back(std::move(event));
    }
    beside_.clear();
}

std::vector<TraceEvent> Trace::take() {
    place_events();
    spread_over_lanes();
    return std::exchange(events_, {});
}

} // namespace bellows::detail
