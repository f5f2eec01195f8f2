// SPDX-License-Identifier: MIT
#include <bellows/train/step_parts.hpp>

#include <bellows/engine/recording.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows {

namespace {

/// Places in StepPartsCounter's lists; kNone: an event counts nowhere.
enum Part : std::size_t {
    kAttention,
    kExperts,
    kExchange,
    kReductions,
    kOptimizer,
    kRest,
    kDevice,
    kNone
};

using Times = std::vector<std::pair<std::int64_t, std::int64_t>>; ///< begin, end

/// Whether the lane is a queue of the device; others are of the host.
bool is_queue(std::string_view lane) {
    for (std::size_t role = 0; role < kNumQueueRoles; ++role)
        if (lane == to_string(static_cast<QueueRole>(role)))
            return true;
    return false;
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, name) != names.end();
}

/// Whether it is work of an op of the schedule: "F0.m3". What pipes move is "PP(F0.m3)".
bool is_of_op(const TraceEvent& event) {
    return !event.op.empty() && is_one_of(std::string_view(event.op).substr(0, 1), {"F", "I", "W"});
}

/// Of the device's work, by the label of its recording: "ATTN(F)", "AdamW". What a lane's job hands
/// in is of an exchange where it is of an op, else of a reduction, unless pipes move it.
Part part_of_work(const TraceEvent& event) {
    const std::string_view label = event.category, node = label.substr(0, label.find('('));
    if (node == "ATTN")
        return kAttention;
    if (is_one_of(node, {"MLP", "SHARED", "ROUTER"}))
        return kExperts;
    if (is_one_of(node, {"DISPATCH", "COMBINE"}))
        return kExchange;
    if (!event.by.empty())
        return is_of_op(event) ? kExchange : event.op.empty() ? kReductions : kRest;
    if (label == "tied gradient")
        return kReductions;
    return is_one_of(label, {"AdamW", "gradient norm", "clear gradients", "copies of weights",
                             "update router biases", "parted"})
               ? kOptimizer
               : kRest;
}

/// Of the host's lanes: jobs of ops are exchanges, and those of collectives reductions.
Part part_of_lane(const TraceEvent& event) {
    if (!event.is_job())
        return kNone;
    if (is_of_op(event))
        return kExchange;
    for (const std::string_view name :
         {"gradients ", "expert gradients ", "tied embedding ", "experts in slots "})
        if (event.lane.starts_with(name))
            return event.op.empty() ? kReductions : kNone;
    return kNone;
}

/// In seconds, what several cover counts once. Sorts them.
double covered(Times& times) {
    std::ranges::sort(times);
    std::int64_t sum = 0, until = 0;
    bool any = false;
    for (const auto& [begin, end] : times) {
        const std::int64_t from = any ? std::max(begin, until) : begin;
        sum += std::max<std::int64_t>(end - from, 0);
        until = any ? std::max(until, end) : end;
        any = true;
    }
    return 1e-9 * static_cast<double>(sum);
}

} // namespace

void StepPartsCounter::add(std::span<const TraceEvent> events) {
    static_assert(kLists == kNone);
    for (const TraceEvent& event : events) {
        const std::pair time(event.begin_ns, event.end_ns);
        const bool on_device = is_queue(event.lane);
        const Part part = on_device ? part_of_work(event) : part_of_lane(event);
        if (part != kNone)
            times_[part].push_back(time);
        if (on_device)
            times_[kDevice].push_back(time);
    }
}

StepParts StepPartsCounter::take() {
    const StepParts parts{.attention = covered(times_[kAttention]),
                          .experts = covered(times_[kExperts]),
                          .exchange = covered(times_[kExchange]),
                          .reductions = covered(times_[kReductions]),
                          .optimizer = covered(times_[kOptimizer]),
                          .rest = covered(times_[kRest]),
                          .device = covered(times_[kDevice])};
    for (auto& times : times_)
        times.clear();
    return parts;
}

} // namespace bellows
