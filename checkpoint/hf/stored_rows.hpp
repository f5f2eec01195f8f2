// SPDX-License-Identifier: MIT
#pragma once

// Values of a stored tensor as they lie in a file, as f32 or bf16. Pure functions, any thread.

#include <bellows/checkpoint/safetensors.hpp>

#include <cstddef>
#include <cstdint>
#include <span>

namespace bellows {

/// Rows and columns that have a scale in common.
inline constexpr std::uint64_t kBlock = 128;

/// A tensor as a matrix, in place; memory need not be aligned.
struct StoredRows {
    StoredType type = StoredType::F32; ///< F32, BF16, F16 or F8_E4M3
    const std::byte* data = nullptr;
    std::uint64_t rows = 0, columns = 0;
    /// With F8_E4M3: [ceil(rows / 128), ceil(columns / 128)] F32 or BF16, multipliers of blocks.
    const std::byte* scales = nullptr;
    StoredType scale_type = StoredType::F32;

    float scale(std::uint64_t block_row, std::uint64_t block_column) const noexcept;
};

/// Whether these codes are numbers.
bool are_numbers(std::span<const std::uint8_t> e4m3) noexcept;

/// The nearest, ties to even; NaN stays NaN.
std::uint16_t to_bf16(float value) noexcept;
float from_bf16(std::uint16_t bits) noexcept;

/// Rows [first, first + out.size() / columns). False if an FP8 code is NaN, or a scale is not
/// finite; out then holds NaN there.
bool read_rows(const StoredRows& from, std::uint64_t first, std::span<float> out) noexcept;
/// The same, rounded to bf16.
bool read_rows(const StoredRows& from, std::uint64_t first, std::span<std::uint16_t> out) noexcept;

} // namespace bellows
