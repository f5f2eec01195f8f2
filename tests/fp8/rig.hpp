// SPDX-License-Identifier: MIT
#pragma once

// What the tests of quantisation share: matrices with everything in them that can go wrong, device
// tensors whose unused bytes hold a pattern, and the codes and scales that the definition gives.

#include "fp8/codes.hpp"
#include "support/op_test.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/fp8/quantize.hpp>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace bellows::testing {

using fp8::Blocks;
using fp8::Decoded;
using fp8::Format;
using fp8::Quantized;
using fp8::Recipe;
using fp8::ScaleRule;
using fp8::Transposed;
using test::kFormats;
using test::reference_format;

inline constexpr std::uint8_t kPoison = 0xA5;

/// A row-major batch of matrices in f32, without padding.
struct HostMatrix {
    std::uint64_t batch = 1, rows = 0, columns = 0;
    std::vector<float> values;

    float& at(std::uint64_t row, std::uint64_t column) { return values[row * columns + column]; }
    std::uint64_t all_rows() const { return batch * rows; }
};

/// Values over many binades, exact in `dtype`, with blocks of zeros, of tiny and of largest values,
/// and now and then -0, a subnormal, an infinity, a NaN, a value at the largest code exactly.
inline HostMatrix awkward_matrix(DType dtype, std::uint64_t batch, std::uint64_t rows,
                                 std::uint64_t columns, std::uint64_t seed, bool finite = false) {
    HostMatrix m{batch, rows, columns, std::vector<float>(batch * rows * columns)};
    test::Random random(seed);
    for (std::uint64_t row = 0; row < m.all_rows(); ++row)
        for (std::uint64_t column = 0; column < columns; ++column) {
            const std::uint64_t kind = (row / 8 * 7 + column / 32 * 3 + seed) % 11;
            const double spread =
                std::ldexp(random.uniform(-1, 1), static_cast<int>(random.below(24)) - 20);
            float value = static_cast<float>(spread);
            if (kind == 1)
                value = random.below(2) != 0 ? 0.0f : -0.0f;
            else if (kind == 2)
                value = static_cast<float>(spread * 1e-7);
            else if (kind == 3)
                value = static_cast<float>(spread * 0x1p124);
            else if (kind == 4)
                value = static_cast<float>(std::ldexp(448.0 / (1 << random.below(12)), 3));
            m.at(row, column) = dtype == DType::BF16 ? test::round_to_bf16(value) : value;
        }
    const float specials[] = {-0.0f,
                              std::bit_cast<float>(0x00010000u), // subnormal
                              std::bit_cast<float>(0x80400000u),
                              std::bit_cast<float>(0x7F7F0000u), // largest bf16
                              std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity(),
                              std::nanf(""),
                              -std::nanf("")};
    const std::uint64_t kinds = finite ? 3 : 8;
    for (std::uint64_t n = 0; n < m.values.size() / 700 + (finite ? 0 : 1); ++n)
        m.values[random.below(m.values.size())] = specials[random.below(kinds)];
    return m;
}

class Fp8Test : public OpTest {
protected:
    /// A tensor in memory of its own; bytes that are no elements hold kPoison.
    struct Tensor {
        Buffer buffer;
        TensorView view;
        std::vector<std::uint8_t> bytes; ///< as uploaded
    };

    /// `row_stride` in elements; padded rows of results keep the pattern that the op must not
    /// touch.
    static Tensor empty(DType dtype, std::uint32_t rank, std::array<std::uint64_t, 4> extent,
                        std::array<std::uint64_t, 4> stride) {
        Tensor t;
        const std::uint64_t elements = rank == 1 ? extent[0] : extent[0] * stride[0];
        t.bytes.assign(std::max<std::uint64_t>(round_up(elements * size_of(dtype), 16), 16),
                       kPoison);
        t.buffer = Buffer(device(), {.name = "fp8 test", .bytes = t.bytes.size()});
        t.view.buffer = t.buffer.view();
        t.view.dtype = dtype;
        t.view.rank = rank;
        t.view.extent = extent;
        t.view.stride = stride;
        device().upload(t.buffer.view(), std::span<const std::uint8_t>(t.bytes));
        return t;
    }

    static Tensor matrix(DType dtype, std::uint64_t batch, std::uint64_t rows,
                         std::uint64_t columns, std::uint64_t padding) {
        const std::uint64_t stride = round_up(columns, 8) + padding;
        return batch == 1 ? empty(dtype, 2, {rows, columns}, {stride, 1})
                          : empty(dtype, 3, {batch, rows, columns}, {rows * stride, stride, 1});
    }

    /// NaN behind every row.
    static Tensor upload(DType dtype, const HostMatrix& m, std::uint64_t padding) {
        Tensor t = matrix(dtype, m.batch, m.rows, m.columns, padding);
        const std::uint64_t stride = round_up(m.columns, 8) + padding;
        std::fill(t.bytes.begin(), t.bytes.end(), std::uint8_t{0xFF});
        for (std::uint64_t row = 0; row < m.all_rows(); ++row)
            for (std::uint64_t column = 0; column < m.columns; ++column) {
                const float value = m.values[row * m.columns + column];
                const std::uint16_t half = test::bf16_bits(value);
                const std::uint64_t at = row * stride + column;
                if (dtype == DType::BF16)
                    std::memcpy(&t.bytes[2 * at], &half, 2);
                else
                    std::memcpy(&t.bytes[4 * at], &value, 4);
            }
        device().upload(t.buffer.view(), std::span<const std::uint8_t>(t.bytes));
        return t;
    }

    static std::vector<std::uint8_t> bytes(const Tensor& t) {
        return read_back<std::uint8_t>(device(), t.buffer.view());
    }

    static Buffer words(const std::vector<std::uint32_t>& values) {
        Buffer buffer(device(), {.name = "words", .bytes = round_up(4 * values.size(), 16)});
        device().upload(buffer.view().sub(0, 4 * values.size()),
                        std::span<const std::uint32_t>(values));
        return buffer;
    }

    /// Codes and scales of a recipe on the device, and what they shall be.
    struct Case {
        Tensor codes, scales;
        Quantized quantized;
        std::vector<std::uint8_t> expected_codes, expected_scales;
        std::vector<float> values; ///< code * scale of the expected ones; 0 where nothing is
        std::vector<bool> there;   ///< rows that are
        std::vector<std::uint32_t> starts; ///< of groups of rows, and their end
    };

    static Case make_case(const Recipe& recipe, std::uint64_t batch, std::uint64_t rows,
                          std::uint64_t columns, std::uint64_t padding = 0,
                          const TensorView& group_offsets = {}) {
        const std::uint64_t groups = group_offsets.buffer ? group_offsets.extent[0] - 1 : 0;
        const bool batched = batch != 1;
        const fp8::Shape scales = batched ? fp8::scales_shape(recipe, {batch, rows, columns})
                                          : fp8::scales_shape(recipe, {rows, columns}, groups);
        const std::uint64_t stride = round_up(columns, 16) + 16 * padding;
        Case c;
        c.codes = batched ? empty(dtype_of(recipe.format), 3, {batch, rows, columns},
                                  {rows * stride, stride, 1})
                          : empty(dtype_of(recipe.format), 2, {rows, columns}, {stride, 1});
        c.scales = empty(scales_dtype(recipe), scales.rank, scales.extent, scales.stride);
        c.quantized = {c.codes.view, c.scales.view, recipe, group_offsets};
        c.expected_codes = c.codes.bytes;
        c.expected_scales = c.scales.bytes;
        c.values.assign(batch * rows * columns, 0.0f);
        c.there.assign(batch * rows, false);
        return c;
    }

    /// The definition: blocks of the rows that are there. `starts`: first row of each group, the
    /// last entry their end; {0, rows} without groups.
    static void expect(Case& c, const HostMatrix& x, std::uint64_t present,
                       const std::vector<std::uint32_t>& starts = {}) {
        const Recipe& recipe = c.quantized.recipe;
        std::vector<std::uint8_t> codes(x.values.size());
        const auto block = [&](std::uint64_t row, std::uint64_t row_end, std::uint64_t column,
                               std::uint64_t column_end) {
            const float scale = reference::fp8_quantize_block(
                x.values, x.columns, {row, row_end, column, column_end},
                reference_format(recipe.format),
                recipe.rule == ScaleRule::F32 ? reference::Fp8Rule::F32
                                              : reference::Fp8Rule::PowerOfTwo,
                codes);
            for (std::uint64_t r = row; r < row_end; ++r)
                for (std::uint64_t i = r * x.columns + column; i < r * x.columns + column_end; ++i)
                    c.values[i] = static_cast<float>(
                        reference::fp8_value(reference_format(recipe.format), codes[i]) *
                        static_cast<double>(scale));
            return scale;
        };
        const TensorView& scales = c.quantized.scales;
        const auto store_scale = [&](std::uint64_t b, std::uint64_t row, std::uint64_t column,
                                     float scale) {
            const std::uint64_t at = scales.rank == 1
                                         ? 0
                                         : (scales.rank == 3 ? b * scales.stride[0] : 0) +
                                               row * scales.stride[scales.rank - 2] + column;
            if (scales.dtype == DType::U8)
                c.expected_scales[at] =
                    std::isnan(scale) ? 0xFF : static_cast<std::uint8_t>(std::ilogb(scale) + 127);
            else
                std::memcpy(&c.expected_scales[4 * at], &scale, 4);
        };
        const std::vector<std::uint32_t> groups =
            starts.empty() ? std::vector<std::uint32_t>{0, static_cast<std::uint32_t>(present)}
                           : starts;
        c.starts = groups;
        const std::uint64_t width = recipe.blocks == Blocks::MX32         ? 32
                                    : recipe.blocks == Blocks::Columns128 ? 1
                                                                          : 128;
        const std::uint64_t height =
            recipe.blocks == Blocks::Columns128 || recipe.blocks == Blocks::Blocks128 ? 128 : 1;
        if (recipe.blocks == Blocks::PerTensor) {
            store_scale(0, 0, 0, block(0, x.batch == 1 ? present : x.all_rows(), 0, x.columns));
        } else {
            for (std::uint64_t b = 0; b < x.batch; ++b)
                for (std::size_t g = 0; g + 1 < groups.size(); ++g)
                    for (std::uint64_t row = groups[g]; row < groups[g + 1]; row += height)
                        for (std::uint64_t column = 0; column < x.columns; column += width) {
                            const std::uint64_t scale_row =
                                starts.empty() ? row / height
                                               : groups[g] / 128 + g + (row - groups[g]) / 128;
                            const std::uint64_t row_end =
                                std::min<std::uint64_t>(row + height, groups[g + 1]);
                            store_scale(b, scale_row, column / width,
                                        block(b * x.rows + row, b * x.rows + row_end, column,
                                              std::min(column + width, x.columns)));
                        }
        }
        store_codes(c, x, codes, present, groups);
        if (scales.dtype == DType::U8)
            zero_scale_padding(c, x, present);
    }

    static void expect_equal(const Case& c, const std::string& what) {
        const auto compare = [&](const char* name, const std::vector<std::uint8_t>& actual,
                                 const std::vector<std::uint8_t>& expected, std::uint64_t size) {
            ASSERT_EQ(actual.size(), expected.size());
            std::uint64_t wrong = 0, first = 0;
            for (std::uint64_t i = actual.size(); i-- > 0;)
                if (!same(actual, expected, i, size))
                    ++wrong, first = i;
            const TensorView& v =
                size == 1 && name[0] == 'c' ? c.quantized.codes : c.quantized.scales;
            EXPECT_EQ(wrong, 0u) << what << ": " << name << ", first at byte " << first
                                 << " of rows of " << v.stride[v.rank < 2 ? 0 : v.rank - 2] * size
                                 << ": " << int(actual[first]) << " where " << int(expected[first])
                                 << " should be";
        };
        compare("codes", bytes(c.codes), c.expected_codes, 1);
        compare("scales", bytes(c.scales), c.expected_scales, size_of(c.quantized.scales.dtype));
    }

    /// `record` must write the values of c, and nothing else.
    static void expect_decoded(const Case& c, const std::string& what,
                               const std::function<void(Recording&, const Decoded&)>& record) {
        const TensorView& codes = c.quantized.codes;
        const std::uint64_t rows = codes.extent[codes.rank - 2], batch = c.there.size() / rows,
                            columns = codes.extent[codes.rank - 1];
        const Tensor y = matrix(DType::BF16, batch, rows, columns, 8);
        run([&](Recording& r) {
            record(r, {y.view, c.quantized.recipe, c.quantized.group_offsets});
        });
        const std::vector<std::uint8_t> actual = bytes(y);
        const std::uint64_t stride = y.view.stride[y.view.rank - 2];
        std::uint64_t wrong = 0;
        std::string first;
        for (std::uint64_t row = 0; row < c.there.size(); ++row)
            for (std::uint64_t column = 0; column < stride; ++column) {
                if (c.there[row] && column >= columns && column < round_up(columns, 8))
                    continue; // unspecified
                std::uint16_t is = 0;
                std::memcpy(&is, &actual[2 * (row * stride + column)], 2);
                const bool value = c.there[row] && column < columns;
                const float wanted = value ? c.values[row * columns + column] : 0.0f;
                const std::uint16_t should = value ? test::bf16_bits(wanted) : kPoison * 0x101u;
                const bool both_nan = value && std::isnan(wanted) && (is & 0x7FFFu) > 0x7F80u;
                if (is == should || both_nan || ++wrong > 1)
                    continue;
                first = std::to_string(row) + ", " + std::to_string(column) + ": bits " +
                        std::to_string(is) + " where " + std::to_string(should) + " should be";
            }
        EXPECT_EQ(wrong, 0u) << what << ", decoded: first at " << first;
    }

    /// `record` must write the codes of c (Columns128) transposed, and its scales, and nothing
    /// else.
    static void
    expect_transposed(const Case& c, const std::string& what,
                      const std::function<void(Recording&, const Transposed&)>& record) {
        const TensorView& codes = c.quantized.codes;
        const std::uint64_t rows = codes.extent[0], columns = codes.extent[1],
                            blocks = c.quantized.scales.extent[0], stride = 128 * blocks,
                            codes_end = columns * stride,
                            scales_end = codes_end + c.expected_scales.size();
        const Tensor memory = empty(DType::U8, 1, {scales_end + 64}, {1});
        const Transposed to =
            fp8::make_transposed(memory.view.buffer.sub(0, scales_end), c.quantized.recipe,
                                 {rows, columns}, c.quantized.group_offsets);
        run([&](Recording& r) { record(r, to); });
        std::vector<std::uint8_t> expected = memory.bytes;
        std::copy(c.expected_scales.begin(), c.expected_scales.end(),
                  expected.begin() + static_cast<std::ptrdiff_t>(codes_end));
        const bool grouped = static_cast<bool>(c.quantized.group_offsets.buffer);
        for (std::size_t g = 0; g + 1 < c.starts.size(); ++g)
            for (std::uint64_t row = c.starts[g]; row < c.starts[g + 1]; ++row) {
                const std::uint64_t in_group = row - c.starts[g],
                                    at = grouped ? 128 * (c.starts[g] / 128 + g) + in_group : row;
                for (std::uint64_t column = 0; column < columns; ++column) {
                    std::uint8_t* code = &expected[column * stride + at];
                    if (in_group % 128 == 0)
                        std::fill_n(code, 128, std::uint8_t{0});
                    *code = c.expected_codes[row * codes.stride[0] + column];
                }
            }
        const std::vector<std::uint8_t> actual = bytes(memory);
        std::uint64_t wrong = 0, first = 0;
        for (std::uint64_t i = actual.size(); i-- > 0;)
            if (!same(actual, expected, i, i >= codes_end && i < scales_end ? 4 : 1))
                ++wrong, first = i;
        EXPECT_EQ(wrong, 0u) << what << ", transposed: first at byte " << first << " of rows of "
                             << stride << ", the scales from " << codes_end << ": "
                             << int(actual[first]) << " where " << int(expected[first])
                             << " should be";
    }

    /// The Error{InvalidArgument} that `record` throws must have `part` in its message.
    template <class F>
    static void refuses(F&& record, const std::string& part) {
        Recording recording(device(), QueueRole::Compute, "refused");
        try {
            record(recording);
            ADD_FAILURE() << "accepted; expected: " << part;
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
            EXPECT_NE(error.message().find(part), std::string::npos) << error.message();
        }
    }

private:
    static bool same(const std::vector<std::uint8_t>& actual,
                     const std::vector<std::uint8_t>& expected, std::uint64_t i,
                     std::uint64_t size) {
        if (actual[i] == expected[i])
            return true;
        if (size != 4) // any NaN is as good as another
            return false;
        float a = 0, e = 0;
        std::memcpy(&a, &actual[i / 4 * 4], 4);
        std::memcpy(&e, &expected[i / 4 * 4], 4);
        return std::isnan(a) && std::isnan(e);
    }

    static void store_codes(Case& c, const HostMatrix& x, const std::vector<std::uint8_t>& codes,
                            std::uint64_t present, const std::vector<std::uint32_t>& groups) {
        const TensorView& view = c.quantized.codes;
        const std::uint64_t stride = view.stride[view.rank - 2];
        for (std::uint64_t row = 0; row < x.all_rows(); ++row) {
            const bool there =
                x.batch != 1 || (row < present && row >= groups.front() && row < groups.back());
            if (!there)
                continue;
            c.there[row] = true;
            std::uint8_t* to = &c.expected_codes[row * stride];
            std::copy_n(&codes[row * x.columns], x.columns, to);
            std::fill(to + x.columns, to + round_up(x.columns, 16), std::uint8_t{0});
        }
    }

    static void zero_scale_padding(Case& c, const HostMatrix& x, std::uint64_t present) {
        const TensorView& view = c.quantized.scales;
        const std::uint64_t count = view.extent[view.rank - 1], stride = view.stride[view.rank - 2];
        for (std::uint64_t row = 0; row < (x.batch == 1 ? present : x.all_rows()); ++row)
            for (std::uint64_t i = count; i < round_up(count, 4); ++i)
                c.expected_scales[row * stride + i] = 0;
    }
};

inline std::string name(const Recipe& recipe, DType dtype, std::uint64_t batch, std::uint64_t rows,
                        std::uint64_t columns, const char* form) {
    return describe(recipe) + " from " + to_string(dtype) + " " + std::to_string(batch) + " x " +
           std::to_string(rows) + " x " + std::to_string(columns) + ", " + form;
}

/// All of them, MX32 with power-of-two scales only.
inline std::vector<Recipe> all_recipes() {
    std::vector<Recipe> recipes;
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const Format format : kFormats)
            for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
                if (blocks != Blocks::MX32 || rule == ScaleRule::PowerOfTwo)
                    recipes.push_back({blocks, format, rule});
    return recipes;
}

struct FormName {
    fp8::Form form;
    const char* name;
};
inline constexpr FormName kForms[] = {
    {fp8::Form::Lanes, "lanes"}, {fp8::Form::Few, "few"}, {fp8::Form::Streams, "streams"}};

} // namespace bellows::testing
