// SPDX-License-Identifier: MIT
#include <bellows/fp8/sizes.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/rounding.hpp>

#include <algorithm>
#include <utility>

namespace bellows::fp8 {

namespace {

/// Row-major with this row stride.
Shape padded(std::initializer_list<std::uint64_t> extents, std::uint64_t row_stride) {
    Shape shape;
    shape.rank = static_cast<std::uint32_t>(extents.size());
    std::copy(extents.begin(), extents.end(), shape.extent.begin());
    shape.stride[shape.rank - 1] = 1;
    if (shape.rank >= 2)
        shape.stride[shape.rank - 2] = row_stride;
    if (shape.rank == 3)
        shape.stride[0] = row_stride * shape.extent[1];
    return shape;
}

void require_matrix(std::initializer_list<std::uint64_t> extents) {
    if (extents.size() != 2 && extents.size() != 3)
        throw Error(ErrorCode::InvalidArgument, "a quantised tensor has 2 or 3 dimensions, not " +
                                                    std::to_string(extents.size()));
}

} // namespace

const char* to_string(Blocks blocks) noexcept {
    switch (blocks) {
    case Blocks::Rows128:
        return "1x128";
    case Blocks::Columns128:
        return "128x1";
    case Blocks::Blocks128:
        return "128x128";
    case Blocks::PerTensor:
        return "per tensor";
    case Blocks::MX32:
        return "MX 1x32";
    }
    return "unknown";
}

const char* to_string(ScaleRule rule) noexcept {
    return rule == ScaleRule::PowerOfTwo ? "power-of-two" : "f32";
}

std::string describe(const Recipe& recipe) {
    return std::string(to_string(recipe.format)) + " " + to_string(recipe.blocks) + ", " +
           to_string(recipe.rule) + " scales";
}

std::uint64_t Shape::num_elements() const noexcept {
    if (rank == 0)
        return 0;
    for (std::uint32_t i = 0; i < rank; ++i)
        if (extent[i] == 0)
            return 0;
    return extent[0] * stride[0];
}

Shape codes_shape(std::initializer_list<std::uint64_t> extents) {
    require_matrix(extents);
    return padded(extents, round_up(*(extents.end() - 1), 16));
}

Shape scales_shape(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                   std::uint64_t groups) {
    require_matrix(extents);
    const bool batched = extents.size() == 3;
    const std::uint64_t batch = *extents.begin(), rows = *(extents.end() - 2),
                        columns = *(extents.end() - 1);
    if (recipe.blocks == Blocks::MX32 && recipe.rule != ScaleRule::PowerOfTwo)
        throw Error(ErrorCode::InvalidArgument, "MX 1x32 has power-of-two scales only");
    if (groups != 0 && (recipe.blocks != Blocks::Columns128 || batched))
        throw Error(ErrorCode::InvalidArgument,
                    "groups of rows are for 128x1 blocks of a tensor without batch, not for " +
                        describe(recipe));
    const auto shape = [&](std::uint64_t scale_rows, std::uint64_t scale_columns,
                           std::uint64_t multiple) {
        const std::uint64_t stride = round_up(scale_columns, multiple);
        return batched ? padded({batch, scale_rows, scale_columns}, stride)
                       : padded({scale_rows, scale_columns}, stride);
    };
    switch (recipe.blocks) {
    case Blocks::Rows128:
        return shape(rows, div_up(columns, 128), 1);
    case Blocks::Columns128:
        return shape(groups != 0 ? rows / 128 + groups : div_up(rows, 128), columns, 8);
    case Blocks::Blocks128:
        return shape(div_up(rows, 128), div_up(columns, 128), 1);
    case Blocks::MX32:
        return shape(rows, div_up(columns, 32), 4);
    case Blocks::PerTensor:
        break;
    }
    return padded({1}, 1);
}

std::uint64_t codes_bytes(std::initializer_list<std::uint64_t> extents) {
    return codes_shape(extents).num_elements();
}

std::uint64_t scales_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                           std::uint64_t groups) {
    return round_up(
        scales_shape(recipe, extents, groups).num_elements() * size_of(scales_dtype(recipe)), 16);
}

std::uint64_t quantized_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                              std::uint64_t groups) {
    return codes_bytes(extents) + scales_bytes(recipe, extents, groups);
}

Shape decoded_shape(std::initializer_list<std::uint64_t> extents) {
    require_matrix(extents);
    return padded(extents, round_up(*(extents.end() - 1), 8));
}

std::uint64_t decoded_bytes(std::initializer_list<std::uint64_t> extents) {
    return round_up(decoded_shape(extents).num_elements() * size_of(DType::BF16), 16);
}

Shape transposed_shape(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                       std::uint64_t groups) {
    if (recipe.blocks != Blocks::Columns128 || extents.size() != 2)
        throw Error(ErrorCode::InvalidArgument,
                    "transposed codes are of 128x1 blocks of a matrix, not of " + describe(recipe) +
                        " of " + std::to_string(extents.size()) + " dimensions");
    const Shape scales = scales_shape(recipe, extents, groups);
    return padded({scales.extent[1], 128 * scales.extent[0]}, 128 * scales.extent[0]);
}

std::uint64_t transposed_bytes(const Recipe& recipe, std::initializer_list<std::uint64_t> extents,
                               std::uint64_t groups) {
    return transposed_shape(recipe, extents, groups).num_elements() +
           scales_bytes(recipe, extents, groups);
}

} // namespace bellows::fp8
