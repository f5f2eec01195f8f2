// SPDX-License-Identifier: MIT
#include "app/pictures/pipeline_report.hpp"

#include "app/pictures/schedule_report.hpp"
#include "app/units.hpp"

#include <bellows/comm/host_collectives.hpp>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace bellows {

namespace {

constexpr double kMs = 1e3;

/// What travels: the lists one after the other behind their lengths.
struct Wire {
    double num_ops = 0, num_exchange = 0, hidden = 0, stalled = 0, activation_bytes = 0;
};

std::vector<std::byte> packed(const RankTimes& times, std::uint64_t activation_bytes,
                              double origin) {
    const Wire head{static_cast<double>(times.ops.size()),
                    static_cast<double>(times.exchange.size()), kMs * times.hidden,
                    kMs * times.stalled, static_cast<double>(activation_bytes)};
    std::vector<OpTime> all;
    for (const auto* list : {&times.ops, &times.exchange})
        for (const OpTime& time : *list)
            all.push_back({kMs * (time.start - origin), kMs * (time.end - origin)});
    std::vector<std::byte> bytes(sizeof head + all.size() * sizeof(OpTime));
    std::memcpy(bytes.data(), &head, sizeof head);
    if (!all.empty())
        std::memcpy(bytes.data() + sizeof head, all.data(), all.size() * sizeof(OpTime));
    return bytes;
}

struct OfRank {
    RankTimes times; ///< in ms
    std::uint64_t activation_bytes = 0;
};

OfRank unpacked(std::span<const std::byte> bytes) {
    Wire head;
    std::memcpy(&head, bytes.data(), sizeof head);
    std::vector<OpTime> all((bytes.size() - sizeof head) / sizeof(OpTime));
    if (!all.empty())
        std::memcpy(all.data(), bytes.data() + sizeof head, all.size() * sizeof(OpTime));
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(head.num_ops);
    return {{{all.begin(), middle}, {middle, all.end()}, head.hidden, head.stalled},
            static_cast<std::uint64_t>(head.activation_bytes)};
}

/// Forwards that have begun and whose input's gradient has not ended, at most. Of a phase one may
/// begin where a gradient is about to leave its memory, which counts once.
std::uint64_t most_in_flight(const Schedule& schedule, std::uint64_t rank,
                             const std::vector<OpTime>& times) {
    struct Change {
        double time;
        int by;
        std::uint32_t phase;
    };
    std::vector<Change> changes;
    const auto& ops = schedule.ops[rank];
    for (std::size_t i = 0; i < ops.size(); ++i)
        if (ops[i].kind == OpKind::Forward)
            changes.push_back({times[i].start, 1, ops[i].phase});
        else if (ops[i].kind != OpKind::WeightGradient)
            changes.push_back({times[i].end, -1, ops[i].phase});
    std::ranges::sort(changes, {}, [](const Change& at) { return std::pair(at.time, at.by); });
    const auto in_memory = [](int count, std::uint64_t slots) {
        const auto begun = static_cast<std::uint64_t>(std::max(count, 0));
        return begun > slots ? begun - 1 : begun;
    };
    std::vector<int> now(schedule.chunks[rank].size());
    std::uint64_t most = 0;
    for (const Change& change : changes) {
        now[change.phase] += change.by;
        std::uint64_t all = 0;
        for (std::uint32_t phase = 0; phase < now.size(); ++phase)
            all += in_memory(now[phase], schedule.peak_in_flight(rank, phase));
        most = std::max(most, all);
    }
    return most;
}

template <class Value, class Text>
std::string each(const std::vector<Value>& values, Text text) {
    std::string all;
    for (const Value& value : values)
        all += (all.empty() ? "" : ", ") + text(value);
    return all;
}

} // namespace

PipelineReport report_pipeline(World& world, const Schedule& schedule, const RunLayout& layout,
                               std::span<const TraceEvent> events, const Device& device,
                               double origin) {
    HostCollectives everyone(world, Group::all(world.size()));
    const std::uint64_t place = static_cast<std::uint64_t>(world.rank()) / layout.dp;
    const MemorySizes peaks = device.memory_report().peaks();
    const auto parts = everyone.all_gather(
        packed(times_of_rank(schedule, place, events),
               peaks[static_cast<std::size_t>(MemoryCategory::Activations)], origin));
    PipelineReport report;
    std::vector<std::vector<OpTime>> ops;
    double exchange = 0, hidden = 0, stalled = 0;
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        OfRank of = unpacked(parts[rank]);
        exchange += length_of(of.times.exchange);
        hidden += of.times.hidden;
        stalled += of.times.stalled;
        if (rank % layout.dp != 0)
            continue;
        report.peak_chunks.push_back(most_in_flight(schedule, ops.size(), of.times.ops));
        report.bound.push_back(schedule.high_water(ops.size()).activations);
        report.activation_bytes.push_back(of.activation_bytes);
        report.exchange.push_back(std::move(of.times.exchange));
        ops.push_back(std::move(of.times.ops));
    }
    const auto count = static_cast<std::ptrdiff_t>(ops.size());
    std::ranges::move(report.exchange, std::back_inserter(ops));
    ops = from_zero(std::move(ops));
    report.exchange.assign(std::make_move_iterator(ops.begin() + count),
                           std::make_move_iterator(ops.end()));
    ops.resize(static_cast<std::size_t>(count));
    report.exchange_ms = exchange / static_cast<double>(parts.size());
    report.hidden_share = exchange > 0 ? hidden / exchange : 0;
    report.stalled_ms = stalled / static_cast<double>(parts.size());
    report.measured = timeline_of(std::move(ops));
    report.simulated = simulate(
        schedule, costs_of(schedule, report.measured,
                           device.distinct_queues(QueueRole::Compute, QueueRole::ComputeDeferred)));
    return report;
}

std::string format_report(const PipelineReport& report) {
    const auto ms = [](double value) { return printed("%.4g ms", value); };
    const auto shares = [](const Timeline& timeline) {
        return each(timeline.bubble, [&](double bubble) {
            return percent(timeline.step_time > 0 ? bubble / timeline.step_time : 0);
        });
    };
    std::string text = "  pipeline, last step measured " + ms(report.measured.step_time) +
                       ", simulated at the measured costs " + ms(report.simulated.step_time) +
                       "\n    bubble by rank   measured " + shares(report.measured) +
                       "\n                     simulated " + shares(report.simulated) + "\n";
    text += "    stalled          " + ms(report.stalled_ms) +
            " on each rank, with nothing to compute\n";
    if (report.exchange_ms > 0)
        text += "    experts' tokens  travel " + ms(report.exchange_ms) + " on each rank, " +
                percent(report.hidden_share) + " of it under other work\n";
    std::size_t rank = 0;
    text += "    activations      " +
            each(report.peak_chunks,
                 [&](std::uint64_t chunks) {
                     const std::size_t at = rank++;
                     return std::to_string(chunks) +
                            (chunks == 1 ? " chunk of at most " : " chunks of at most ") +
                            std::to_string(report.bound[at]) + " (" +
                            format_bytes(report.activation_bytes[at]) + ")";
                 }) +
            "\n";
    return text;
}

std::string report_svg(const Schedule& schedule, const PipelineReport& report) {
    return schedule_svg(schedule, report.measured, "measured", "ms", report.exchange);
}

} // namespace bellows
