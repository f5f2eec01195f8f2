// SPDX-License-Identifier: MIT
#pragma once

// Recipes of quantisation, and the shapes, strides and bytes of codes and scales that follow from
// them. Plain values and pure functions, without a device: whoever plans a run calls them, too.

#include <bellows/base/dtype.hpp>
#include <bellows/fp8/format.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

namespace bellows::fp8 {

enum class Blocks : std::uint8_t {
    Rows128,    ///< 1 x 128 along columns: activations, gradients
    Columns128, ///< 128 x 1 along rows: operands of a weight's gradient, whose sum goes over rows
    Blocks128,  ///< 128 x 128: weights; survives transposition
    PerTensor,  ///< one scale for all, from the tensor itself
    MX32,       ///< 1 x 32 along columns, UE8M0 scales
};

enum class ScaleRule : std::uint8_t {
    PowerOfTwo, ///< code * scale is exact in bf16
    F32,        ///< the block's largest value becomes the largest code
};

const char* to_string(Blocks blocks) noexcept;
const char* to_string(ScaleRule rule) noexcept;

struct Recipe {
    Blocks blocks = Blocks::Rows128;
    Format format = Format::E4M3;
    ScaleRule rule = ScaleRule::PowerOfTwo; ///< MX32: PowerOfTwo

    bool operator==(const Recipe&) const = default;
};

/// "e4m3 1x128, power-of-two scales".
std::string describe(const Recipe& recipe);

/// Extents and strides (in elements) of a rank 1, 2 or 3 tensor; unused entries are 0.
struct Shape {
    static constexpr std::size_t kMaxRank = 4;

    std::uint32_t rank = 0;
    std::array<std::uint64_t, kMaxRank> extent{};
    std::array<std::uint64_t, kMaxRank> stride{};

    /// From the first element to the end of the last row's padding.
    std::uint64_t num_elements() const noexcept;
};

/// Row stride round_up(columns, 16). extents: {rows, columns} or {batch, rows, columns}.
Shape codes_shape(std::initializer_list<std::uint64_t> extents);
/// groups: of Quantized::group_offsets, 0 without. Throws Error{InvalidArgument} if the recipe has
/// no such form.
Shape scales_shape(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                   std::uint64_t groups = 0);
constexpr DType scales_dtype(const Recipe& recipe) noexcept {
    return recipe.blocks == Blocks::MX32 ? DType::U8 : DType::F32;
}

/// Bytes of codes and scales, each rounded up to 16.
std::uint64_t codes_bytes(std::initializer_list<std::uint64_t> extents);
std::uint64_t scales_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                           std::uint64_t groups = 0);
/// Their sum.
std::uint64_t quantized_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                              std::uint64_t groups = 0);

/// Row stride round_up(columns, 8): of values of codes (Decoded::values).
Shape decoded_shape(std::initializer_list<std::uint64_t> extents);
/// Bytes of Decoded::values with a row stride of round_up(columns, 8), rounded up to 16.
std::uint64_t decoded_bytes(std::initializer_list<std::uint64_t> extents);

/// Of Transposed::codes: [columns, 128 * blocks], contiguous, with as many blocks as the scales of
/// Columns128 have rows. extents: {rows, columns}. Throws Error{InvalidArgument} for a recipe of
/// other blocks, or other than two extents.
Shape transposed_shape(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                       std::uint64_t groups = 0);
/// Bytes of Transposed::codes and Transposed::scales, each rounded up to 16. Throws as
/// transposed_shape does.
std::uint64_t transposed_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                               std::uint64_t groups = 0);

} // namespace bellows::fp8
