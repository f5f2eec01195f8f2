// SPDX-License-Identifier: MIT
#pragma once

// `bellows schedule`: a pipeline schedule and what becomes of it, as text, JSON, a picture or a
// trace; or all schedules beside each other, or a pair. Pure functions but for the last.

#include "app/pictures/pair_report.hpp"

#include <bellows/schedule/simulate.hpp>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace bellows {

enum class ScheduleFormat : std::uint8_t { Text, Json, Svg, Trace };

struct ScheduleOptions {
    bool compare =
        false; ///< all kinds, for desc's numbers; costs are of a rank's share of the model
    ScheduleDesc desc;
    SimulationOptions costs;
    bool decoupled = false, early_gradients = false; ///< decouple_pairs(), split_backwards()
    std::optional<PairOptions> pair;                 ///< that and not a schedule
    ScheduleFormat format = ScheduleFormat::Text;
    std::optional<std::filesystem::path> out; ///< unset: standard output
};

/// What stands behind "key=". Throws Error{InvalidArgument} unless it is a number of at least 0.
double parse_cost(const std::string& key, const std::string& text);
/// "f=1,i=1,w=1,fb=3,p2p=0,transfer=0", any of them, of all stages, or of each with ':' between.
/// p2p and transfer are of all. Throws Error{InvalidArgument}.
SimulationOptions parse_costs(const std::string& text);

/// A line of ops per rank, then step time, bubble and peak chunks of each.
std::string schedule_text(const Schedule& schedule, const Timeline& timeline);
std::string schedule_json(const Schedule& schedule, const Timeline& timeline);
/// what: "simulated" or "measured"; unit: of the times; exchange: when each rank's experts' tokens
/// travelled, left out where there were none.
std::string schedule_svg(const Schedule& schedule, const Timeline& timeline,
                         const std::string& what = "simulated",
                         const std::string& unit = "units of the costs",
                         const std::vector<std::vector<OpTime>>& exchange = {});
/// For chrome://tracing or ui.perfetto.dev: a unit of time is a millisecond.
std::string schedule_trace(const Schedule& schedule, const Timeline& timeline);

/// All kinds for the same ranks, micro-batches and model: a line each, or why there is none. Stages
/// that are a part of a rank's share cost that part.
std::string comparison_text(const ScheduleOptions& options);
std::string comparison_json(const ScheduleOptions& options);

/// What the options ask for. Returns an exit code; throws Error{InvalidArgument}, Error{Io}.
int print_schedule(const ScheduleOptions& options);

} // namespace bellows
