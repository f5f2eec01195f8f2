// SPDX-License-Identifier: MIT
#pragma once

// What the trace of a step that a PipelineExecutor has run tells of its schedule: when each op ran,
// how much of the experts' exchange ran under other work, and the costs for a simulation of it.
// Pure functions.

#include <bellows/engine/trace.hpp>
#include <bellows/schedule/simulate.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace bellows {

/// Added up.
double length_of(const std::vector<OpTime>& times);

/// Of one rank, in seconds of its host's clock.
struct RankTimes {
    /// As Schedule::ops of the rank: from the begin of an op's first work to the end of its last,
    /// be it the device's or a lane's. Ops overlap where the device overlaps them; an op of no work
    /// stands at the end of those before it.
    std::vector<OpTime> ops;
    std::vector<OpTime> exchange; ///< while jobs of ops ran on lanes: ascending, apart
    double hidden = 0;            ///< of exchange, while the ops' own work ran on the device
    double stalled = 0; ///< of the time from the first op to the last, while none of it did
};

/// events: of one step.
RankTimes times_of_rank(const Schedule& schedule, std::uint64_t rank,
                        std::span<const TraceEvent> events);

/// Costs with which simulate() can be asked for the measured step: of each stage's forwards, input
/// and weight gradients and pairs the mean of what they kept their rank for, an op from the end of
/// those before it on. Kinds of which a stage has none get the mean of the other stages', else what
/// pairs leave. Where ranks have the same stage one may be slower. Latency: of the message that was
/// there soonest after its op had ended, 0 where one was there before (those of a Backward leave
/// when its first half has ended). weight_gradients_beside: the step ran where these have a queue
/// of their own. Unless other ops ran beside each other, too, as pairs do, it is simulated with
/// rows of their own (SimulationOptions::rows), whose shares follow from how much longer ops took
/// that ran beside the other row; costs are those of ops alone, of weight gradients from their
/// input gradients' ends on.
SimulationOptions costs_of(const Schedule& schedule, const Timeline& measured,
                           bool weight_gradients_beside = false);

} // namespace bellows
