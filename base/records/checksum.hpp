// SPDX-License-Identifier: MIT
#pragma once

// Check sums of what is stored on disk. Pure functions, any thread.

#include <cstdint>
#include <string>

namespace bellows {

/// CRC-32 (zlib's) of the bytes, continuing from `start`.
std::uint32_t crc32_of(const void* data, std::uint64_t bytes, std::uint32_t start = 0) noexcept;

/// The sum of two runs of bytes, one behind the other, from their own sums.
std::uint32_t crc32_joined(std::uint32_t first, std::uint32_t second,
                           std::uint64_t second_bytes) noexcept;

/// Eight lower-case hex digits.
std::string hex32(std::uint32_t value);

} // namespace bellows
