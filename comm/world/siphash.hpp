// SPDX-License-Identifier: MIT
#pragma once

// SipHash-2-4 with a 128-bit result (J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input
// PRF", 2012): the keyed proof with which two ranks show each other that they know the job's key
// without sending it, and with which each frame between them is tagged.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bellows {

using SipKey = std::array<std::uint8_t, 16>;
using SipTag = std::array<std::uint8_t, 16>;

SipTag siphash_128(const SipKey& key, std::span<const std::byte> message) noexcept;
/// Of the words, as little-endian bytes, and the message behind them.
SipTag siphash_128(const SipKey& key, std::span<const std::uint64_t> words,
                   std::span<const std::byte> message) noexcept;

/// Compares in a time that does not depend on where the two differ.
bool equal_constant_time(const SipTag& a, const SipTag& b) noexcept;

} // namespace bellows
