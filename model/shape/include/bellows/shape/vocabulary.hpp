// SPDX-License-Identifier: MIT
#pragma once

// A vocabulary of any size in memory. Products read and write whole groups of eight columns of
// logits, so the embedding and the head have rows of zeros up to a multiple of eight, whose logits
// count nowhere and whose gradients are zero. Checkpoints do not have these rows. Pure functions.

#include <bellows/base/rounding.hpp>

#include <cstdint>

namespace bellows {

/// Rows of the embedding and the head in memory, and columns of logits.
constexpr std::uint64_t padded_vocabulary(std::uint64_t vocabulary) noexcept {
    return round_up(vocabulary, std::uint64_t{8});
}

} // namespace bellows
