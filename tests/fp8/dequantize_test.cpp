// SPDX-License-Identifier: MIT
// Dequantisation against code * scale, bit by bit.

#include "fp8/rig.hpp"

#include <bellows/base/rounding.hpp>

namespace bellows {
namespace {

using namespace testing;

class Fp8Dequantize : public Fp8Test {
protected:
    /// Uploads what the definition gives, dequantises it and compares; absent rows keep their
    /// pattern.
    static void check(const Recipe& recipe, DType dtype, std::uint64_t batch, std::uint64_t rows,
                      std::uint64_t columns, std::uint64_t seed, std::uint64_t present,
                      const std::vector<std::uint32_t>& starts = {}) {
        SCOPED_TRACE(name(recipe, dtype, batch, rows, columns, "dequantised"));
        const HostMatrix x = awkward_matrix(DType::F32, batch, rows, columns, seed);
        const Buffer count = words({static_cast<std::uint32_t>(present)}), offsets = words(starts);
        const TensorView offsets_view =
            starts.empty() ? TensorView{} : offsets.tensor(DType::U32, {starts.size()});
        Case c = make_case(recipe, batch, rows, columns, seed % 2, offsets_view);
        expect(c, x, present, starts);
        device().upload(c.codes.buffer.view(), std::span<const std::uint8_t>(c.expected_codes));
        device().upload(c.scales.buffer.view(), std::span<const std::uint8_t>(c.expected_scales));
        if (present < rows)
            c.quantized.codes.row_count = count.view();
        for (const FormName& form : kForms) {
            SCOPED_TRACE(form.name);
            const Tensor y = matrix(dtype, batch, rows, columns, 8 * (seed % 3));
            run([&](Recording& r) { fp8::dequantize(r, c.quantized, y.view, form.form); });
            compare(y, c, batch, present, starts);
        }
    }

    static void compare(const Tensor& y, const Case& c, std::uint64_t batch, std::uint64_t present,
                        const std::vector<std::uint32_t>& starts) {
        const TensorView& v = y.view;
        const std::uint64_t rows = v.extent[v.rank - 2], columns = v.extent[v.rank - 1],
                            stride = v.stride[v.rank - 2], size = size_of(v.dtype);
        const auto actual = bytes(y);
        const std::uint64_t first = starts.empty() ? 0 : starts.front(),
                            end = starts.empty() ? present : starts.back();
        std::uint64_t wrong = 0;
        for (std::uint64_t row = 0; row < batch * rows; ++row) {
            const bool there = batch != 1 || (row >= first && row < end && row < present);
            for (std::uint64_t column = 0; column < stride; ++column) {
                if (there && column >= columns && column < round_up(columns, 8))
                    continue;
                const std::uint8_t* at = &actual[(row * stride + column) * size];
                const bool good =
                    there && column < columns
                        ? holds(at, v.dtype, c.values[row * columns + column])
                        : std::all_of(at, at + size, [](std::uint8_t b) { return b == kPoison; });
                if (!good && wrong++ == 0)
                    ADD_FAILURE() << "first wrong at [" << row << ", " << column << "], expected "
                                  << (there && column < columns ? c.values[row * columns + column]
                                                                : 0.0f);
            }
        }
        EXPECT_EQ(wrong, 0u);
    }

    static bool holds(const std::uint8_t* at, DType dtype, float expected) {
        float value = 0;
        std::uint16_t half = 0;
        if (dtype == DType::BF16) {
            std::memcpy(&half, at, 2);
            value = test::from_bf16(half);
            expected = test::round_to_bf16(expected);
        } else {
            std::memcpy(&value, at, 4);
        }
        return std::isnan(expected)
                   ? std::isnan(value)
                   : std::bit_cast<std::uint32_t>(value) == std::bit_cast<std::uint32_t>(expected);
    }
};

TEST_F(Fp8Dequantize, EveryRecipe) {
    std::uint64_t seed = 0;
    for (const Recipe& recipe : all_recipes())
        for (const DType dtype : {DType::F32, DType::BF16}) {
            check(recipe, dtype, 1, 137, 264, ++seed, 137);
            check(recipe, dtype, 1, 3, 640, ++seed, 3);
        }
}

TEST_F(Fp8Dequantize, EveryNumberOfColumns) {
    std::uint64_t seed = 100;
    for (const Recipe& recipe : all_recipes())
        for (const std::uint64_t columns : {1u, 7u, 8u, 9u, 17u, 127u, 129u})
            check(recipe, DType::BF16, 1, 5, columns, ++seed, 5);
}

TEST_F(Fp8Dequantize, Batches) {
    std::uint64_t seed = 200;
    for (const Recipe& recipe : all_recipes())
        check(recipe, DType::BF16, 3, 130, 136, ++seed, 130);
}

TEST_F(Fp8Dequantize, AbsentRowsAreLeftAlone) {
    std::uint64_t seed = 300;
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const std::uint64_t present : {1u, 5u, 128u, 131u, 199u})
            check({.blocks = blocks}, DType::BF16, 1, 200, 72, ++seed, present);
}

TEST_F(Fp8Dequantize, BlocksBeginAtEachGroup) {
    std::uint64_t seed = 400;
    const std::vector<std::vector<std::uint32_t>> layouts = {
        {0, 300},    {0, 5, 5, 133, 134, 300},      {0, 0, 0, 128, 256, 256}, {0, 127, 255, 299},
        {7, 9, 200}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}};
    for (const auto& starts : layouts)
        for (const DType dtype : {DType::F32, DType::BF16})
            check({.blocks = Blocks::Columns128}, dtype, 1, 300, 136, ++seed, 300, starts);
}

TEST_F(Fp8Dequantize, EveryUe8m0Scale) {
    const std::uint64_t rows = 256, columns = 32;
    Case c = make_case({.blocks = Blocks::MX32}, 1, rows, columns);
    for (std::uint64_t row = 0; row < rows; ++row) {
        const auto scale_code = static_cast<std::uint8_t>(row);
        c.expected_scales[row * 4] = scale_code;
        for (std::uint64_t column = 0; column < columns; ++column) {
            const auto code = static_cast<std::uint8_t>(8 * column + row % 8);
            c.expected_codes[row * columns + column] = code;
            const double value = reference::fp8_value(reference::Fp8Format::E4M3, code);
            c.values[row * columns + column] = static_cast<float>(
                value * (row == 255 ? std::nan("") : std::ldexp(1, static_cast<int>(row) - 127)));
        }
    }
    device().upload(c.codes.buffer.view(), std::span<const std::uint8_t>(c.expected_codes));
    device().upload(c.scales.buffer.view(), std::span<const std::uint8_t>(c.expected_scales));
    const Tensor y = matrix(DType::F32, 1, rows, columns, 0);
    run([&](Recording& r) { fp8::dequantize(r, c.quantized, y.view); });
    const auto actual = read_back<float>(device(), y.buffer.view());
    for (std::size_t i = 0; i < actual.size(); ++i) {
        if (std::isnan(c.values[i]))
            ASSERT_TRUE(std::isnan(actual[i])) << i;
        else if (c.values[i] == 0 || std::fpclassify(c.values[i]) != FP_SUBNORMAL)
            ASSERT_EQ(actual[i], c.values[i]) << i;
        else // drivers may flush it
            ASSERT_TRUE(actual[i] == c.values[i] || actual[i] == 0) << i;
    }
}

TEST_F(Fp8Dequantize, SaysWhatDoesNotFit) {
    const Case c = make_case({}, 1, 8, 256);
    const Tensor y = matrix(DType::BF16, 1, 8, 264, 0), cube = matrix(DType::BF16, 2, 4, 256, 0);
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(fp8::dequantize(recording, c.quantized, y.view), Error);
    EXPECT_THROW(fp8::dequantize(recording, c.quantized, cube.view), Error);
    Quantized wrong = c.quantized;
    wrong.scales.extent[1] = 1;
    EXPECT_THROW(fp8::dequantize(recording, wrong, matrix(DType::BF16, 1, 8, 256, 0).view), Error);
}

} // namespace
} // namespace bellows
