// SPDX-License-Identifier: MIT
#pragma once

// How a run's overlapped pairs interleave: what their nodes are, how long each takes, and the
// pattern that follows from it. Pure functions, but where collective is said.

#include <bellows/comm/host_collectives.hpp>
#include <bellows/engine/trace.hpp>
#include <bellows/model/stage.hpp>
#include <bellows/schedule/pair.hpp>

#include <cstddef>
#include <map>
#include <span>
#include <string>

namespace bellows {

/// Seconds of a node of each name, e.g. "ATTN(F)".
using NodeSeconds = std::map<std::string, double>;

/// From the trace of a step in which nodes of a name ran so many times: the mean of what one took
/// the device (an equal share where nodes ran at once), or the exchange.
NodeSeconds node_seconds(std::span<const TraceEvent> events,
                         const std::map<std::string, std::size_t>& runs);

/// Collective: of each name the mean of the ranks that have it, the same on all.
NodeSeconds mean_of_ranks(HostCollectives& ranks, const NodeSeconds& mine);

/// Of a forward of one stage and a backward of another; nodes that `seconds` lacks take
/// `otherwise`.
PairNodes pair_of(const Stage& forward, const Stage& backward, const NodeSeconds& seconds,
                  double otherwise = 0);

/// The part of `chunks` that is a layer with experts: one node of each name. Empty where there is
/// none.
PairNodes layer_with_experts(const PairNodes& chunks);

} // namespace bellows
