// SPDX-License-Identifier: MIT
#pragma once

// Training steps of a model under one schedule after another, on the same device.

#include "app/pictures/pipeline_report.hpp"
#include "ranks/timing.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/schedule/schedule.hpp>
#include <bellows/train/train_config.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows::bench {

struct ModelSteps {
    Schedule schedule;
    PipelineReport report; ///< of the step that is off by the median
    /// As the report's, medians of the steps; off: how much longer they took than simulated.
    double simulated_ms = 0, measured_ms = 0, off = 0, simulated_bubble = 0, measured_bubble = 0;
    Spread spread_ms; ///< of measured_ms
    double exchange_ms = 0, hidden_share = 0, stalled_ms = 0;
    double loss = 0;                ///< of the first timed step, after three updates
    double whole_ms = 0;            ///< of a step by itself, optimiser included; median
    double tokens_per_s = 0;        ///< of steps one behind the other, as in training; median
    double seconds_waited = 0;      ///< StepResult::seconds_waited, mean
    std::string pattern;            ///< how pairs were interleaved
    std::vector<TraceEvent> events; ///< of this rank in the last step by itself
};

/// How long a model's steps are tried.
struct StepCounts {
    static constexpr std::uint64_t kLeastWarmUp = 3; ///< the first compiles, two change the weights
    std::uint64_t warm_up = kLeastWarmUp;            ///< the last but one measures nodes
    std::uint64_t timed = 3;
};

/// Collective: after the warm-up the timed steps each by itself, then as many one behind the other,
/// all on the same made-up tokens and, after the first three, with the same weights (but routers'
/// biases). config.train says the schedule and the layout. Throws Error{InvalidArgument} for what
/// cannot be.
ModelSteps run_model(Stopwatch& watch, Device& device, const RunConfig& config,
                     const StepCounts& counts);

} // namespace bellows::bench
