// SPDX-License-Identifier: MIT
#pragma once

// The kinds of a layer's nodes, and which op of a schedule they belong to. Pure.

#include <bellows/schedule/schedule.hpp>

#include <cstdint>

namespace bellows {

enum class NodeKind : std::uint8_t { Forward, InputGradient, WeightGradient };

/// Of an op that is no Backward.
constexpr NodeKind node_kind(OpKind op) noexcept {
    return op == OpKind::Forward         ? NodeKind::Forward
           : op == OpKind::InputGradient ? NodeKind::InputGradient
                                         : NodeKind::WeightGradient;
}

} // namespace bellows
