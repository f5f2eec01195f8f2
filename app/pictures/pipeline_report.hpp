// SPDX-License-Identifier: MIT
#pragma once

// How a step went through the pipeline: what its trace shows of the schedule's ops, beside what the
// simulator says at the same costs.

#include <bellows/checkpoint/checkpoint.hpp>
#include <bellows/comm/world.hpp>
#include <bellows/engine/device.hpp>
#include <bellows/pipeline/measure.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace bellows {

/// By ranks of the pipeline, of which the first of the ranks that stand there speaks, in ms.
struct PipelineReport {
    Timeline measured, simulated;
    std::vector<std::vector<OpTime>> exchange;
    /// Of each rank: forwards whose input gradient was still to come, at most, and how many the
    /// schedule says; bytes of activations that the device had at most.
    std::vector<std::uint64_t> peak_chunks, bound, activation_bytes;
    double exchange_ms = 0;  ///< mean of all ranks
    double hidden_share = 0; ///< of it, under the ops' own work
    double stalled_ms = 0;   ///< of the step, when a rank computes nothing; mean of all ranks
};

/// Collective: events are this rank's of one step, device what ran them. origin: what the clocks of
/// different hosts read at one time, in seconds; 0 on one host.
PipelineReport report_pipeline(World& world, const Schedule& schedule, const RunLayout& layout,
                               std::span<const TraceEvent> events, const Device& device,
                               double origin);

/// A few lines for the end of a run.
std::string format_report(const PipelineReport& report);
/// The measured step as a picture.
std::string report_svg(const Schedule& schedule, const PipelineReport& report);

} // namespace bellows
