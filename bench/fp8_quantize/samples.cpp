// SPDX-License-Identifier: MIT
#include "fp8_quantize/workloads.hpp"

#include <algorithm>

namespace bellows::bench {

namespace {

using fp8::Blocks;
using fp8::Format;
using fp8::Quantized;

/// Rows and columns of a block that shares a scale; the scales are row-major.
struct BlockShape {
    std::uint64_t rows, columns;
};

BlockShape block_shape(Blocks blocks, std::uint64_t rows, std::uint64_t columns) {
    switch (blocks) {
    case Blocks::Rows128:
        return {1, 128};
    case Blocks::Columns128:
        return {128, 1};
    case Blocks::Blocks128:
        return {128, 128};
    case Blocks::MX32:
        return {1, 32};
    case Blocks::PerTensor:
        break;
    }
    return {rows, columns};
}

/// The bytes of rows of u8 or f8 elements.
std::vector<std::uint8_t> read_bytes(const OpData& data, const TensorView& view,
                                     std::uint64_t first, std::uint64_t count) {
    std::vector<std::uint8_t> bytes(count);
    data.device().download(view.buffer.sub(first, count), std::span<std::uint8_t>(bytes));
    return bytes;
}

std::vector<double> read_scales(const OpData& data, const Quantized& q) {
    if (q.recipe.blocks != Blocks::MX32)
        return data.read(q.scales);
    const auto codes = read_bytes(data, q.scales, 0, q.scales.num_elements());
    std::vector<double> scales(codes.size());
    std::transform(codes.begin(), codes.end(), scales.begin(), fp8::decode_ue8m0);
    return scales;
}

std::uint64_t columns_of(const TensorView& view) {
    return view.extent[view.rank - 1];
}
std::uint64_t rows_in(const TensorView& view) {
    return view.num_elements() / columns_of(view);
}

/// Half of the distance between neighbouring values around `value`.
double half_step(Format format, double value, double scale) {
    const bool e4m3 = format == Format::E4M3;
    return 1.001 *
           std::max(std::abs(value) * (e4m3 ? 0x1p-4 : 0x1p-3), scale * (e4m3 ? 0x1p-10 : 0x1p-17));
}

std::string check_scale(const fp8::Recipe& recipe, double scale, double amax) {
    const double wanted = std::max(amax, 1e-4) / fp8::largest(recipe.format);
    const double most = recipe.rule == fp8::ScaleRule::PowerOfTwo ? 2 * wanted : wanted;
    if (scale >= wanted * (1 - 1e-5) && scale <= most * (1 + 1e-5))
        return "";
    return "a scale is " + std::to_string(scale) + ", expected " + std::to_string(wanted) +
           " or the power of two above";
}

/// The decoded values of some rows and which scales belong to them.
struct Tile {
    const Quantized& q;
    std::vector<double> scales;
    BlockShape block;
    std::uint64_t scales_per_row;

    Tile(const OpData& data, const Quantized& quantized)
        : q(quantized), scales(read_scales(data, quantized)),
          block(block_shape(q.recipe.blocks, rows_in(q.codes), columns_of(q.codes))),
          scales_per_row((columns_of(q.codes) + block.columns - 1) / block.columns) {}

    double scale(std::uint64_t row, std::uint64_t column) const {
        return scales[row / block.rows * scales_per_row + column / block.columns];
    }
};

} // namespace

TensorView repeated(OpData& data, DType dtype, const QuantizeShape& shape) {
    const std::uint64_t rows = shape.all_rows(), drawn = std::min<std::uint64_t>(rows, 256);
    const TensorView x = shape.batch == 1
                             ? data.empty(dtype, {shape.rows, shape.columns})
                             : data.empty(dtype, {shape.batch, shape.rows, shape.columns}),
                     pattern = data.random(dtype, {drawn, shape.columns}, -4, 4);
    const std::uint64_t row_bytes = shape.columns * size_of(dtype);
    Recording recording(data.device(), QueueRole::Compute, "repeat");
    for (std::uint64_t row = 0; row < rows; row += drawn) {
        const std::uint64_t bytes = std::min(drawn, rows - row) * row_bytes;
        recording.copy(pattern.buffer.sub(0, bytes), x.buffer.sub(row * row_bytes, bytes));
    }
    data.device().submit(recording).wait();
    return x;
}

Quantized empty_codes(OpData& data, const fp8::Recipe& recipe, const QuantizeShape& s) {
    if (s.batch == 1)
        return fp8::make_quantized(data.bytes(fp8::codes_bytes({s.rows, s.columns})),
                                   data.bytes(fp8::scales_bytes(recipe, {s.rows, s.columns})),
                                   recipe, {s.rows, s.columns});
    return fp8::make_quantized(data.bytes(fp8::codes_bytes({s.batch, s.rows, s.columns})),
                               data.bytes(fp8::scales_bytes(recipe, {s.batch, s.rows, s.columns})),
                               recipe, {s.batch, s.rows, s.columns});
}

Quantized quantized(OpData& data, const fp8::Recipe& recipe, const QuantizeShape& shape) {
    const Quantized q = empty_codes(data, recipe, shape);
    const TensorView x = repeated(data, DType::BF16, shape);
    Recording recording(data.device(), QueueRole::Compute, "quantize");
    fp8::quantize(recording, x, q);
    data.device().submit(recording).wait();
    return q;
}

Rows rows_of(const OpData& data, const TensorView& view) {
    return [&data, view](std::uint64_t first, std::uint64_t count) {
        return data.read(view.reshaped({rows_in(view), columns_of(view)}).rows(first, count));
    };
}

Rows rows_of(const OpData& data, const Quantized& q) {
    return [&data, q](std::uint64_t first, std::uint64_t count) {
        const Tile tile(data, q);
        const std::uint64_t columns = columns_of(q.codes);
        const auto codes = read_bytes(data, q.codes, first * columns, count * columns);
        std::vector<double> values(codes.size());
        for (std::uint64_t i = 0; i < codes.size(); ++i)
            values[i] = fp8::decode(q.recipe.format, codes[i]) *
                        tile.scale(first + i / columns, i % columns);
        return values;
    };
}

std::string check_quantized(const OpData& data, const Quantized& q, const Rows& expected,
                            double amax) {
    const Tile tile(data, q);
    const std::uint64_t columns = columns_of(q.codes), rows = rows_in(q.codes);
    const bool whole = q.recipe.blocks == Blocks::PerTensor;
    const std::uint64_t height = whole ? 1 : tile.block.rows;
    for (const std::uint64_t at : samples((rows + height - 1) / height)) {
        const std::uint64_t first = at * height, count = std::min(height, rows - first);
        const auto wanted = expected(first, count), actual = rows_of(data, q)(first, count);
        for (std::uint64_t c = 0; c < columns; c += tile.block.columns) {
            double most = amax;
            const double scale = tile.scale(first, c);
            for (std::uint64_t r = 0; r < count; ++r)
                for (std::uint64_t i = r * columns + c;
                     i < r * columns + std::min(c + tile.block.columns, columns); ++i) {
                    most = std::max(most, std::abs(wanted[i]));
                    if (!(std::abs(actual[i] - wanted[i]) <=
                          half_step(q.recipe.format, wanted[i], scale)))
                        return "code * scale at " + std::to_string(first * columns + i) + " is " +
                               std::to_string(actual[i]) + ", expected " +
                               std::to_string(wanted[i]);
                }
            if (const std::string wrong = check_scale(q.recipe, scale, most); !wrong.empty())
                return wrong;
        }
    }
    return "";
}

double bytes_of(const Quantized& q) {
    return bytes_of({q.codes, q.scales});
}

} // namespace bellows::bench
