// SPDX-License-Identifier: MIT
#pragma once

// The three parts of a pair by number, and what a node of one needs. Internal to the pipeline.

#include <bellows/schedule/pair.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bellows {

enum PairPart : std::uint8_t { kForward, kInput, kWeight };
inline constexpr std::size_t kNumPairParts = 3;
inline constexpr std::array<OpKind, kNumPairParts> kKindOfPart = {
    OpKind::Forward, OpKind::InputGradient, OpKind::WeightGradient};

inline const std::vector<PairNode>& nodes_of(const PairNodes& nodes, std::size_t part) {
    return nodes.of(kKindOfPart[part]);
}

/// The first `count` nodes of a part.
struct PairNeeds {
    PairPart part = kForward;
    std::size_t count = 0;
};

/// What the part's node of that index waits for.
inline PairNeeds needs_of(const PairNodes& nodes, PairPart part, std::size_t index) {
    const auto& all = nodes_of(nodes, part);
    if (part == kWeight)
        return {kInput, all[index].after};
    const bool beside = all[index].beside_exchange &&
                        all[index].resource == NodeResource::Compute && index > 0 &&
                        all[index - 1].resource == NodeResource::Exchange;
    return {part, beside ? index - 1 : index};
}

} // namespace bellows
