// SPDX-License-Identifier: MIT
#include <bellows/fp8/recipe.hpp>

#include "operands.hpp"

#include <algorithm>
#include <bit>

namespace bellows::fp8 {

namespace {

constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr std::uint32_t kFloor = 0x38D1B717u; // 1e-4

TensorView view_of(BufferView memory, DType dtype, const Shape& shape) {
    static_assert(Shape::kMaxRank == TensorView::kMaxRank);
    TensorView view;
    view.dtype = dtype;
    view.rank = shape.rank;
    view.extent = shape.extent;
    view.stride = shape.stride;
    view.buffer = memory.sub(0, shape.num_elements() * size_of(dtype));
    return view;
}

std::uint64_t groups_of(const TensorView& group_offsets) {
    return group_offsets.buffer ? group_offsets.extent[0] - 1 : 0;
}

} // namespace

float block_scale(Format format, ScaleRule rule, float amax) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(amax) & 0x7FFFFFFFu;
    if (bits > kInfinity)
        return std::bit_cast<float>(0x7FC00000u);
    const std::uint32_t limited = std::clamp(bits, kFloor, kInfinity - 1);
    const bool e4m3 = format == Format::E4M3;
    if (rule == ScaleRule::F32)
        return std::bit_cast<float>(limited) *
               std::bit_cast<float>(e4m3 ? 0x3B124925u : 0x37924925u);
    // largest(format) is 1.75 * 2^down: mantissas up to .75 keep their exponent
    const std::uint32_t down = e4m3 ? 8 : 15;
    return std::bit_cast<float>(std::min(((limited + 0x1FFFFFu) >> 23) - down, 254 - down) << 23);
}

float inverse_scale(ScaleRule rule, float scale) noexcept {
    const auto bits = std::bit_cast<std::uint32_t>(scale);
    if ((bits & 0x7FFFFFFFu) > kInfinity)
        return scale;
    if (rule == ScaleRule::PowerOfTwo)
        return std::bit_cast<float>(0x7F000000u - bits);
    auto inverse = std::bit_cast<float>(0x7EF311C7u - bits);
    for (int i = 0; i < 4; ++i) {
        const float product = scale * inverse;
        const float correction = 2.0f - product;
        inverse = inverse * correction;
    }
    return inverse;
}

Quantized make_quantized(BufferView codes, BufferView scales, const Recipe& recipe,
                         std::initializer_list<std::uint64_t> extents,
                         const TensorView& group_offsets) {
    const std::uint64_t groups = groups_of(group_offsets);
    return {view_of(codes, dtype_of(recipe.format), codes_shape(extents)),
            view_of(scales, scales_dtype(recipe), scales_shape(recipe, extents, groups)), recipe,
            group_offsets};
}

Quantized make_quantized(BufferView memory, const Recipe& recipe,
                         std::initializer_list<std::uint64_t> extents,
                         const TensorView& group_offsets) {
    const std::uint64_t groups = groups_of(group_offsets);
    const std::uint64_t first = codes_bytes(extents);
    return make_quantized(memory.sub(0, first),
                          memory.sub(first, scales_bytes(recipe, extents, groups)), recipe, extents,
                          group_offsets);
}

Decoded make_decoded(BufferView memory, const Recipe& recipe,
                     std::initializer_list<std::uint64_t> extents,
                     const TensorView& group_offsets) {
    return {view_of(memory, DType::BF16, decoded_shape(extents)), recipe, group_offsets};
}

Transposed make_transposed(BufferView memory, const Recipe& recipe,
                           std::initializer_list<std::uint64_t> extents,
                           const TensorView& group_offsets) {
    const std::uint64_t groups = groups_of(group_offsets);
    const Shape codes = transposed_shape(recipe, extents, groups);
    const std::uint64_t first = codes.num_elements();
    return {view_of(memory.sub(0, first), dtype_of(recipe.format), codes),
            view_of(memory.sub(first, scales_bytes(recipe, extents, groups)), DType::F32,
                    scales_shape(recipe, extents, groups)),
            recipe, group_offsets, *extents.begin()};
}

} // namespace bellows::fp8
