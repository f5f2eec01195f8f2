// SPDX-License-Identifier: MIT
#pragma once

// Texts that ranks have written each for its own prompts, brought together on one of them.

#include "app/generate/writer.hpp"

#include <bellows/comm/world.hpp>

#include <cstddef>
#include <vector>

namespace bellows {

/// Collective. Rank r of R has written prompts r, r + R and so on of so many. True on the first
/// rank that lives, where texts and times become those of all; of a lost rank the texts are empty,
/// have failed and are degraded. Throws Error{PeerLost} where the world does not outlive a lost
/// rank.
bool gather_texts(World& world, std::size_t prompts, std::vector<Written>& written,
                  WritingTimes& times);

} // namespace bellows
