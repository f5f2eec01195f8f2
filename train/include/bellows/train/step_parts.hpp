// SPDX-License-Identifier: MIT
#pragma once

// Where a step's time goes: how long a rank's device worked on each part of the model and of the
// training, by the trace, which a training run takes of every step anyway. One thread.

#include <bellows/engine/trace.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace bellows {

/// Seconds during which work of a part ran. Kernels of one part that run at the same time count
/// once. Parts may run beside each other, so their sum may exceed the step.
struct StepParts {
    double attention = 0;  ///< norms, projections and core, with their gradients
    double experts = 0;    ///< routed and shared experts, and the router
    double exchange = 0;   ///< dispatch and combine, from their first work on a lane to the last
    double reductions = 0; ///< of gradients, and of weights after the update, on device and lanes
    double optimizer = 0;  ///< the norm of the gradient, AdamW, copies of weights
    double rest = 0;       ///< embedding, head, dense FFNs and all else on the device
    double device = 0;     ///< any work of the device

    bool operator==(const StepParts&) const = default;
};

inline constexpr std::array kStepParts = {
    &StepParts::attention, &StepParts::experts, &StepParts::exchange, &StepParts::reductions,
    &StepParts::optimizer, &StepParts::rest,    &StepParts::device};

/// Adds up what traces say, piece by piece: of 10,000 events in a millisecond.
class StepPartsCounter {
public:
    /// Each event once. They may be of work that ended since the last call: an update that ends
    /// after its step then counts in the next one.
    void add(std::span<const TraceEvent> events);
    /// Returns the parts of all that was added since the last call.
    StepParts take();

private:
    static constexpr std::size_t kLists = 7;
    /// Begins and ends in nanoseconds, of each part and of the device.
    std::array<std::vector<std::pair<std::int64_t, std::int64_t>>, kLists> times_;
};

} // namespace bellows
