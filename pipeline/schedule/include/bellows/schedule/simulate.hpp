// SPDX-License-Identifier: MIT
#pragma once

// When each op of a schedule begins and ends if every rank starts an op as soon as it is free and
// has what the op needs. No Vulkan, no MPI; pure functions. Times are in whatever unit the costs
// are in.

#include <bellows/schedule/schedule.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace bellows {

/// How long a stage's ops take.
struct StageCosts {
    double forward = 1, input_gradient = 1, weight_gradient = 1;
    /// Of a pair's two halves together, this stage's forward overlapping a backward; unset: one
    /// after the other.
    std::optional<double> pair{};
    double backward() const noexcept { return input_gradient + weight_gradient; }
    /// All of them times `factor`: those of a part of a stage, or in another unit.
    StageCosts scaled(double factor) const noexcept;
};

/// A rank's two rows of work: while both run, each goes on at a share of its speed. Halves gain
/// nothing over one row, and two ones hold up nobody.
struct RowShares {
    double weight_gradients = 0.5;
    double others = 0.5;
};

struct SimulationOptions {
    std::vector<StageCosts> stages{StageCosts{}}; ///< of each stage, or one for all
    /// How much longer each rank takes than the stages' costs say, e.g. 2 for one that is half as
    /// fast; empty: no rank does.
    std::vector<double> slowness{};
    /// A message is there so long after its link has carried it, which takes a link p2p_transfer
    /// per message. Each rank has a link to each other, in both directions.
    double p2p_latency = 0, p2p_transfer = 0;
    /// Set: weight gradients have a row of their own, as on a device with a queue for them, in
    /// their order, each from its input gradient's end on; not those of the first stage, whose
    /// input gradients go nowhere, nor those of pairs and of whole backwards. A forward whose
    /// activations take the place of an earlier micro-batch's begins behind that one's weight
    /// gradient. Unset: one row, in the schedule's order.
    std::optional<RowShares> rows{};
};

struct OpTime {
    double start = 0, end = 0;
};

struct Timeline {
    std::vector<std::vector<OpTime>> ops; ///< as Schedule::ops; a pair's two have the same times
    double step_time = 0;                 ///< from the first op's start to the last one's end
    std::vector<double> busy;             ///< of each rank
    /// Of each rank: what it idles within the step, and between its own first and last op.
    std::vector<double> bubble, inner_bubble;
    std::uint64_t messages = 0; ///< between ranks

    /// Of the rank that idles most, as a share of the step.
    double bubble_share() const;
};

/// Of ops that begin at 0 rather than when they did.
std::vector<std::vector<OpTime>> from_zero(std::vector<std::vector<OpTime>> ops);

/// What becomes of times, simulated or measured: all but messages.
Timeline timeline_of(std::vector<std::vector<OpTime>> ops);

/// Throws Error{InvalidArgument} as verify() does, and for costs that are negative or not finite,
/// add up to no finite time, or of another number of stages or ranks.
Timeline simulate(const Schedule& schedule, const SimulationOptions& options = {});

/// The schedule with each pair's halves as two ops, the one first whose input is there first at
/// these costs. Each then starts with its own input and sends its result when it ends, which is
/// shorter where pairs compute one after the other: in DualPipe of P ranks by P / 2 - 1 forwards.
/// Throws like simulate().
Schedule decouple_pairs(const Schedule& schedule, const SimulationOptions& options = {});

} // namespace bellows
