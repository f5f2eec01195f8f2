// SPDX-License-Identifier: MIT
#pragma once

// The counter-based randomness of the command: a bijection of 64 bits, so that what is drawn
// follows from a key and a count alone.

#include <cstdint>

namespace bellows {

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

} // namespace bellows
