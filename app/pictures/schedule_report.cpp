// SPDX-License-Identifier: MIT
#include "app/pictures/schedule_report.hpp"

#include "app/exit_code.hpp"
#include "app/pictures/gantt.hpp"
#include "app/trace_file.hpp"
#include "app/units.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <sstream>
#include <utility>

namespace bellows {

namespace {

using Json = nlohmann::ordered_json;

/// "2", or "2 to 4" where ranks differ.
template <class Print>
std::string range(const std::vector<double>& values, Print print) {
    const auto [low, high] = std::minmax_element(values.begin(), values.end());
    const std::string from = print(*low), to = print(*high);
    return from == to ? from : from + " to " + to;
}
std::string range(const std::vector<double>& values) {
    return range(values, number);
}
/// " ms"; nothing behind what is in units of the costs.
const char* suffix_of(const std::string& unit) {
    return unit == "ms" ? " ms" : "";
}
/// In a picture: measured ones, in ms, are no more exact than that.
std::string rounded(double value, const std::string& unit) {
    return unit == "ms" ? printed(value < 100 ? "%.3g" : "%.0f", value) : number(value);
}

double most(const std::vector<double>& values) {
    return *std::max_element(values.begin(), values.end());
}

std::string title_of(const Schedule& schedule) {
    return schedule.name + ", " + std::to_string(schedule.num_ranks()) + " ranks, " +
           std::to_string(schedule.num_micro_batches) + " micro-batches";
}

[[noreturn]] void refuse(const std::string& why) {
    throw Error(ErrorCode::InvalidArgument, why);
}

/// One stage's.
StageCosts parse_stage(const std::string& text, SimulationOptions& all) {
    StageCosts costs;
    std::istringstream entries(text);
    for (std::string entry; std::getline(entries, entry, ',');) {
        const std::size_t equals = entry.find('=');
        const std::string key = entry.substr(0, equals);
        const std::string value = equals == std::string::npos ? "" : entry.substr(equals + 1);
        if (key == "f")
            costs.forward = parse_cost(key, value);
        else if (key == "i")
            costs.input_gradient = parse_cost(key, value);
        else if (key == "w")
            costs.weight_gradient = parse_cost(key, value);
        else if (key == "fb")
            costs.pair = parse_cost(key, value);
        else if (key == "p2p")
            all.p2p_latency = parse_cost(key, value);
        else if (key == "transfer")
            all.p2p_transfer = parse_cost(key, value);
        else
            refuse("--costs: there is no " + in_quotes(key) +
                   ", there are f, i, w, fb, p2p and transfer");
    }
    return costs;
}

/// By kind, of even and odd phases.
const char* color_of(const ScheduleOp& op) {
    static constexpr std::array<std::array<const char*, 2>, 4> kColors{{
        {"#f6c85f", "#eda04d"},
        {"#7fbf9b", "#4f9f83"},
        {"#8fc1e3", "#5b9bcb"},
        {"#c3bcd6", "#c3bcd6"},
    }};
    return kColors[static_cast<std::size_t>(op.kind)][op.phase % 2];
}

/// phases: how many there are.
std::string meaning_of(const ScheduleOp& op, std::size_t phases) {
    static constexpr std::array<const char*, 4> kKinds = {"forward", "backward", "input gradient",
                                                          "weight gradient"};
    const std::string kind = kKinds[static_cast<std::size_t>(op.kind)];
    if (phases == 1 || op.kind == OpKind::WeightGradient)
        return kind;
    return phases == 2 ? kind + ", phase " + std::to_string(op.phase)
                       : kind + (op.phase % 2 == 0 ? ", even phases" : ", odd phases");
}

/// Phases with queues of their own, and what fills those.
int layer_of(const ScheduleOp& op) {
    return op.kind == OpKind::WeightGradient ? 2 : static_cast<int>(op.phase % 2);
}

/// The rows and legend of a timeline.
GanttChart chart_of(const Schedule& schedule, const Timeline& timeline, const std::string& unit) {
    GanttChart chart;
    std::map<std::pair<OpKind, bool>, std::pair<std::string, std::string>> legend;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        const std::string idle = rounded(timeline.bubble[rank], unit);
        GanttRow row{"rank " + std::to_string(rank), idle + suffix_of(unit) + " idle", {}};
        const auto& ops = schedule.ops[rank];
        for (std::size_t i = 0; i < ops.size(); ++i) {
            const ScheduleOp& op = ops[i];
            const OpTime& time = timeline.ops[rank][i];
            row.bars.push_back({time.start, time.end, std::to_string(op.micro_batch), to_name(op),
                                color_of(op), layer_of(op)});
            const bool odd = op.phase % 2 != 0 && op.kind != OpKind::WeightGradient;
            legend[{op.kind, odd}] = {meaning_of(op, schedule.chunks[rank].size()), color_of(op)};
        }
        // Two at once leave room for labels in a row of the usual height.
        chart.row_height =
            std::max(chart.row_height, static_cast<double>(stack_bars(row.bars)) / 2);
        chart.rows.push_back(std::move(row));
    }
    for (auto& [key, entry] : legend)
        chart.legend.push_back(std::move(entry));
    return chart;
}

/// A strip at the foot of each row.
void add_exchange(GanttChart& chart, const std::vector<std::vector<OpTime>>& exchange) {
    constexpr double kTop = 0.8;
    constexpr const char* kColor = "#475569";
    for (std::size_t rank = 0; rank < chart.rows.size(); ++rank) {
        for (GanttBar& bar : chart.rows[rank].bars) {
            bar.top *= kTop;
            bar.bottom *= kTop;
        }
        for (const OpTime& time : exchange[rank])
            chart.rows[rank].bars.push_back(
                {time.start, time.end, "", "experts' tokens travel", kColor, 0, kTop, 1});
    }
    chart.legend.emplace_back("experts' tokens travel", kColor);
}

/// The schedule with what the options change of it.
Schedule changed(const ScheduleOptions& options, Schedule schedule,
                 const SimulationOptions& costs) {
    if (options.decoupled)
        schedule = decouple_pairs(schedule, costs);
    return options.early_gradients ? split_backwards(std::move(schedule)) : schedule;
}

/// A line of a comparison.
struct Compared {
    ScheduleKind kind = ScheduleKind::GPipe;
    std::string impossible; ///< why; then nothing else counts
    double step_time = 0, bubble = 0, bubble_share = 0, inner_bubble = 0, activations = 0,
           deferred = 0;
    double traffic = 0; ///< messages that a rank sends per micro-batch, mean of the ranks
    std::uint64_t copies = 1;
};

Compared compared(const ScheduleOptions& options, ScheduleKind kind) {
    Compared line;
    line.kind = kind;
    ScheduleDesc desc = options.desc;
    desc.kind = kind;
    Schedule schedule;
    try {
        schedule = make_schedule(desc);
    } catch (const Error& error) {
        line.impossible = error.message();
        return line;
    }
    const double ranks = static_cast<double>(desc.ranks);
    const double part = ranks / static_cast<double>(schedule.num_stages);
    SimulationOptions costs = options.costs;
    for (StageCosts& of : costs.stages)
        of = of.scaled(part);
    schedule = changed(options, std::move(schedule), costs);
    const Timeline timeline = simulate(schedule, costs);
    line.step_time = timeline.step_time;
    line.bubble = most(timeline.bubble);
    line.bubble_share = timeline.bubble_share();
    line.inner_bubble = most(timeline.inner_bubble);
    for (std::uint64_t rank = 0; rank < desc.ranks; ++rank) {
        const HighWater peak = schedule.high_water(rank);
        line.activations = std::max(line.activations, part * static_cast<double>(peak.activations));
        line.deferred = std::max(line.deferred, part * static_cast<double>(peak.deferred));
    }
    line.traffic =
        static_cast<double>(timeline.messages) / ranks / static_cast<double>(desc.micro_batches);
    line.copies = schedule.num_streams;
    return line;
}

std::vector<Compared> compare(const ScheduleOptions& options) {
    if (options.costs.stages.size() != 1)
        refuse("--compare takes the costs of a rank's share of the model, not of each stage");
    std::vector<Compared> lines;
    for (std::size_t kind = 0; kind < kNumScheduleKinds; ++kind)
        lines.push_back(compared(options, static_cast<ScheduleKind>(kind)));
    return lines;
}

std::string shown_comparison(const ScheduleOptions& options) {
    return options.format == ScheduleFormat::Json ? comparison_json(options)
                                                  : comparison_text(options);
}

std::string shown_schedule(const ScheduleOptions& options) {
    const Schedule schedule = changed(options, make_schedule(options.desc), options.costs);
    const Timeline timeline = simulate(schedule, options.costs);
    switch (options.format) {
    case ScheduleFormat::Text:
        return schedule_text(schedule, timeline);
    case ScheduleFormat::Json:
        return schedule_json(schedule, timeline);
    case ScheduleFormat::Svg:
        return schedule_svg(schedule, timeline);
    case ScheduleFormat::Trace:
        return schedule_trace(schedule, timeline);
    }
    return {};
}

std::string shown_pair(const ScheduleOptions& options) {
    const PairReport report(*options.pair);
    switch (options.format) {
    case ScheduleFormat::Text:
        return pair_text(report);
    case ScheduleFormat::Json:
        return pair_json(report);
    case ScheduleFormat::Svg:
        return pair_svg(report);
    case ScheduleFormat::Trace:
        return pair_trace(report);
    }
    return {};
}

} // namespace

double parse_cost(const std::string& key, const std::string& text) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value) ||
        value < 0)
        refuse("--costs: " + key + " must be a number of at least 0, not " + in_quotes(text));
    return value;
}

SimulationOptions parse_costs(const std::string& text) {
    SimulationOptions options;
    options.stages.clear();
    std::istringstream stages(text + ":"); // an empty last one counts
    for (std::string stage; std::getline(stages, stage, ':');)
        options.stages.push_back(parse_stage(stage, options));
    return options;
}

std::string schedule_text(const Schedule& schedule, const Timeline& timeline) {
    std::string text = title_of(schedule) + "\n\n";
    std::istringstream lines(to_text(schedule));
    std::uint64_t rank = 0;
    for (std::string line; std::getline(lines, line); ++rank)
        text += "rank " + std::to_string(rank) + ": " + line + "\n";
    text += "\nstep time " + number(timeline.step_time) + ", bubble " + range(timeline.bubble) +
            " (" + percent(timeline.bubble_share()) + "), between a rank's first and last op " +
            range(timeline.inner_bubble) +
            "; messages between ranks: " + std::to_string(timeline.messages) + "\n";
    text += "peak chunks       activations  deferred weight gradients  both at once\n";
    for (rank = 0; rank < schedule.num_ranks(); ++rank) {
        const HighWater peak = schedule.high_water(rank);
        std::array<char, 128> line{};
        std::snprintf(line.data(), line.size(), "  rank %-10llu %11llu  %25llu  %12llu\n",
                      static_cast<unsigned long long>(rank),
                      static_cast<unsigned long long>(peak.activations),
                      static_cast<unsigned long long>(peak.deferred),
                      static_cast<unsigned long long>(peak.both));
        text += line.data();
    }
    return text;
}

std::string schedule_json(const Schedule& schedule, const Timeline& timeline) {
    Json ranks = Json::array();
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        Json chunks = Json::array(), ops = Json::array();
        for (const ScheduleChunk& chunk : schedule.chunks[rank])
            chunks.push_back({{"stage", chunk.stage}, {"stream", chunk.stream}});
        for (std::size_t i = 0; i < schedule.ops[rank].size(); ++i) {
            const ScheduleOp& op = schedule.ops[rank][i];
            ops.push_back({{"name", to_name(op)},
                           {"phase", op.phase},
                           {"micro_batch", op.micro_batch},
                           {"pair_with_next", op.with_next},
                           {"start", timeline.ops[rank][i].start},
                           {"end", timeline.ops[rank][i].end}});
        }
        const HighWater peak = schedule.high_water(rank);
        ranks.push_back({{"rank", rank},
                         {"chunks", std::move(chunks)},
                         {"busy", timeline.busy[rank]},
                         {"bubble", timeline.bubble[rank]},
                         {"inner_bubble", timeline.inner_bubble[rank]},
                         {"peak_chunks",
                          {{"activations", peak.activations},
                           {"deferred", peak.deferred},
                           {"both", peak.both}}},
                         {"ops", std::move(ops)}});
    }
    const Json all = {{"kind", schedule.name},
                      {"ranks", schedule.num_ranks()},
                      {"stages", schedule.num_stages},
                      {"streams", schedule.num_streams},
                      {"micro_batches", schedule.num_micro_batches},
                      {"step_time", timeline.step_time},
                      {"messages", timeline.messages},
                      {"programs", std::move(ranks)}};
    return all.dump(1) + "\n";
}

std::string schedule_svg(const Schedule& schedule, const Timeline& timeline,
                         const std::string& what, const std::string& unit,
                         const std::vector<std::vector<OpTime>>& exchange) {
    GanttChart chart = chart_of(schedule, timeline, unit);
    const auto print = [&](double value) { return rounded(value, unit); };
    const bool at_once =
        schedule.has_pairs() || std::ranges::any_of(chart.rows, [](const GanttRow& row) {
            return std::ranges::any_of(row.bars,
                                       [](const GanttBar& bar) { return bar.bottom < 1; });
        });
    if (std::ranges::any_of(exchange, [](const auto& times) { return !times.empty(); }))
        add_exchange(chart, exchange);
    chart.title = title_of(schedule);
    chart.subtitle = what + ": step time " + print(timeline.step_time) + suffix_of(unit) +
                     ", bubble " + range(timeline.bubble, print) + suffix_of(unit) + " (" +
                     percent(timeline.bubble_share()) + "); numbers are micro-batches" +
                     (at_once ? ", what runs at once" : "") +
                     (schedule.has_pairs() ? ", as a pair's two," : "") +
                     (at_once ? " stands above each other" : "");
    chart.x_label = "time in " + unit;
    return gantt_svg(chart);
}

std::string schedule_trace(const Schedule& schedule, const Timeline& timeline) {
    constexpr double kNanoseconds = 1e6;
    std::vector<std::string> parts;
    for (std::uint64_t rank = 0; rank < schedule.num_ranks(); ++rank) {
        std::vector<TraceEvent> events;
        for (std::size_t i = 0; i < schedule.ops[rank].size(); ++i) {
            const ScheduleOp& op = schedule.ops[rank][i];
            const OpTime& time = timeline.ops[rank][i];
            // Two at once cannot stand on one lane.
            const bool second = i > 0 && schedule.ops[rank][i - 1].with_next;
            events.push_back(
                {.lane = second ? "compute, a pair's backward" : "compute",
                 .name = to_name(op),
                 .category = "stage " + std::to_string(schedule.chunk_of(rank, op).stage),
                 .begin_ns = std::llround(time.start * kNanoseconds),
                 .end_ns = std::llround(time.end * kNanoseconds)});
        }
        parts.push_back(trace_of_rank(events, static_cast<int>(rank)));
    }
    return trace_document(parts);
}

std::string comparison_text(const ScheduleOptions& options) {
    std::string text = std::to_string(options.desc.ranks) + " ranks, " +
                       std::to_string(options.desc.micro_batches) +
                       " micro-batches, the same model on all; activations and deferred weight "
                       "gradients in those of a rank's\nshare of the model, messages that a rank "
                       "sends per micro-batch\n\n";
    text += "schedule     step time    bubble   share  inner bubble  parameters  activations  "
            "deferred  messages\n";
    for (const Compared& line : compare(options)) {
        std::array<char, 256> row{};
        if (line.impossible.empty())
            std::snprintf(
                row.data(), row.size(), "%-11s %10s %9s %7s %13s %10s %12s %9s %9s\n",
                to_string(line.kind), number(line.step_time).c_str(), number(line.bubble).c_str(),
                percent(line.bubble_share).c_str(), number(line.inner_bubble).c_str(),
                (std::to_string(line.copies) + "x").c_str(), number(line.activations).c_str(),
                number(line.deferred).c_str(), printed("%.3g", line.traffic).c_str());
        else
            std::snprintf(row.data(), row.size(), "%-11s %10s %s\n", to_string(line.kind), "-",
                          line.impossible.c_str());
        text += row.data();
    }
    return text + "\nbubble: of the rank that idles most, within the step; inner: between its own "
                  "first and last op, which is what is left\nwhere steps follow each other "
                  "without waiting\n";
}

std::string comparison_json(const ScheduleOptions& options) {
    Json schedules = Json::array();
    for (const Compared& line : compare(options))
        schedules.push_back(
            line.impossible.empty()
                ? Json{{"kind", to_string(line.kind)},
                       {"step_time", line.step_time},
                       {"bubble", line.bubble},
                       {"inner_bubble", line.inner_bubble},
                       {"parameter_copies", line.copies},
                       {"activations", line.activations},
                       {"deferred", line.deferred},
                       {"messages_per_micro_batch", line.traffic}}
                : Json{{"kind", to_string(line.kind)}, {"impossible", line.impossible}});
    const Json all = {{"ranks", options.desc.ranks},
                      {"micro_batches", options.desc.micro_batches},
                      {"schedules", std::move(schedules)}};
    return all.dump(1) + "\n";
}

int print_schedule(const ScheduleOptions& options) {
    const std::string text = options.pair      ? shown_pair(options)
                             : options.compare ? shown_comparison(options)
                                               : shown_schedule(options);
    if (options.out)
        write_file_durably(*options.out, text);
    else
        std::fputs(text.c_str(), stdout);
    return kExitGood;
}

} // namespace bellows
