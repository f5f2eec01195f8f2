// SPDX-License-Identifier: MIT
#pragma once

// Bytes by what they are for, and bytes for people. Pure values, any thread.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace bellows {

/// A kernel reaches 4 GiB of an operand: some drivers (NVIDIA's 580) count the bytes from its
/// address on in 32 bits.
inline constexpr std::uint64_t kKernelReach = std::uint64_t{1} << 32;

/// What memory is for; the memory report sums over these.
enum class MemoryCategory : std::uint8_t {
    Weights,
    Gradients,
    Optimizer,
    Activations,
    DeferredWgrad,
    Communication,
    Scratch,
    Cache, ///< keys and values of sequences that are generated
};
inline constexpr std::size_t kNumMemoryCategories = 8;
const char* to_string(MemoryCategory category) noexcept;
/// Bytes by category.
using MemorySizes = std::array<std::uint64_t, kNumMemoryCategories>;

/// 24117248 → "23.0 MiB", 512 → "512 B".
std::string format_bytes(std::uint64_t bytes);
/// "12.3 MiB: optimiser 8.0 MiB, weights 4.3 MiB", largest first, without empty categories.
std::string describe_memory(const MemorySizes& bytes);

} // namespace bellows
