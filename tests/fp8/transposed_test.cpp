// SPDX-License-Identifier: MIT
// Codes of columns that stand transposed, bit by bit those that stand as they were: groups of rows
// of every kind, rows that are not there, rows by slots, from every kind of input.
// quantize_test.cpp checks both layouts on more matrices.

#include "fp8/rig.hpp"

#include <algorithm>
#include <numeric>

namespace bellows {
namespace {

using namespace testing;

constexpr std::uint64_t kRows = 700;

/// Empty groups, groups of 1, 127, 128, 129 and more rows, at offsets that are and are not
/// multiples of 128; absent rows behind the last group.
const std::vector<std::vector<std::uint32_t>> kStarts = {
    {0, 1, 128, 256, 385, 385, 690},
    {0, 0, 0, 129, 256, 257, 257, 512, 640, 640},
    {3, 131, 260, 260, 388, 515, 516},
    {128, 128, 128},
    {699, 700},
};

/// As a kernel sees groups of which no more than so many rows are there.
std::vector<std::uint32_t> cut(std::vector<std::uint32_t> starts, std::uint64_t present) {
    for (std::uint32_t& start : starts)
        start = std::min(start, static_cast<std::uint32_t>(present));
    return starts;
}

std::vector<Recipe> column_recipes() {
    std::vector<Recipe> recipes = all_recipes();
    std::erase_if(recipes, [](const Recipe& r) { return r.blocks != Blocks::Columns128; });
    return recipes;
}

class Fp8Transposed : public Fp8Test {
protected:
    /// Columns of x, which stands in `in`, in groups. `starts` empty: without groups.
    struct Columns {
        Buffer offsets, count;
        Case expected;

        Columns(const Recipe& recipe, const HostMatrix& x, const std::vector<std::uint32_t>& starts,
                std::uint64_t present)
            : offsets(words(starts)), count(words({static_cast<std::uint32_t>(present)})),
              expected(make_case(recipe, 1, x.rows, x.columns, 0,
                                 starts.empty() ? TensorView{}
                                                : offsets.tensor(DType::U32, {starts.size()}))) {
            expect(expected, x, present, cut(starts, present));
        }
    };

    static std::string say(const Recipe& recipe, std::size_t groups, std::uint64_t columns,
                           std::uint64_t present, const char* form) {
        return describe(recipe) + ", groups " + std::to_string(groups) + ", " +
               std::to_string(columns) + " columns, " + std::to_string(present) + " rows, " + form;
    }
};

TEST_F(Fp8Transposed, GroupsFromEveryInput) {
    std::uint64_t seed = 0;
    for (const Recipe& recipe : column_recipes())
        for (std::size_t g = 0; g < kStarts.size(); ++g)
            for (const std::uint64_t present : {kRows, std::uint64_t{300}}) {
                const std::uint64_t columns = g % 2 == 0 ? 200 : 67;
                const DType dtype = ++seed % 2 == 0 ? DType::F32 : DType::BF16;
                const HostMatrix x = awkward_matrix(dtype, 1, kRows, columns, seed);
                const Tensor in = upload(dtype, x, 8);
                const Columns plain(recipe, x, kStarts[g], present);
                Case by_row =
                    make_case({Blocks::Rows128, recipe.format, recipe.rule}, 1, kRows, columns);
                expect(by_row, x, kRows);
                const Columns again(recipe, {1, kRows, columns, by_row.values}, kStarts[g],
                                    present);
                run([&](Recording& r) { fp8::quantize(r, in.view, by_row.quantized); });
                by_row.quantized.codes.row_count = again.count.view();
                for (const FormName& form : kForms) {
                    const std::string what = say(recipe, g, columns, present, form.name);
                    expect_transposed(plain.expected, what, [&](Recording& r, const Transposed& t) {
                        fp8::quantize(r, in.view.with_row_count(plain.count.view()), t, form.form);
                    });
                    expect_transposed(again.expected, what + ", from codes",
                                      [&](Recording& r, const Transposed& t) {
                                          fp8::requantize(r, by_row.quantized, t, form.form);
                                      });
                    if (HasFailure())
                        return;
                }
                if (present != kRows)
                    continue;
                // Codes that stand by rows are turned as they are.
                const Quantized& q = plain.expected.quantized;
                run([&](Recording& r) { fp8::quantize(r, in.view, q); });
                expect_transposed(plain.expected, say(recipe, g, columns, present, "turned"),
                                  [&](Recording& r, const Transposed& t) {
                                      fp8::transpose_codes(r, q, t.codes);
                                      r.copy(q.scales.buffer.sub(0, t.scales.buffer.bytes),
                                             t.scales.buffer);
                                  });
            }
}

/// A token's row that is in several groups is read where it stands.
TEST_F(Fp8Transposed, GroupsBySlots) {
    const std::uint64_t tokens = 350, columns = 136, present = 600;
    const std::uint32_t top_k = 2;
    std::vector<std::uint32_t> slots(kRows);
    for (std::uint32_t row = 0; row < kRows; ++row)
        slots[row] = row * 73 % (top_k * tokens);
    const Buffer of_rows = words(slots), count = words({present});
    std::uint64_t seed = 50;
    for (const Recipe& recipe : column_recipes()) {
        const HostMatrix x = awkward_matrix(DType::BF16, 1, tokens, columns, ++seed);
        const Tensor in = upload(DType::BF16, x, 0);
        Case by_row = make_case({Blocks::Rows128, recipe.format, recipe.rule}, 1, tokens, columns);
        expect(by_row, x, tokens);
        HostMatrix gathered{1, kRows, columns, {}};
        for (const std::uint32_t slot : slots) {
            const auto row =
                by_row.values.begin() + static_cast<std::ptrdiff_t>(slot / top_k * columns);
            gathered.values.insert(gathered.values.end(), row,
                                   row + static_cast<std::ptrdiff_t>(columns));
        }
        const Columns c(recipe, gathered, kStarts[0], present);
        run([&](Recording& r) { fp8::quantize(r, in.view, by_row.quantized); });
        const TensorView slots_view = of_rows.tensor(DType::I32, {kRows});
        const fp8::RowsBySlots by{slots_view.with_row_count(count.view()), top_k};
        for (const FormName& form : kForms)
            expect_transposed(c.expected, describe(recipe) + " by slots, " + form.name,
                              [&](Recording& r, const Transposed& t) {
                                  fp8::requantize(r, by_row.quantized, by, t, form.form);
                              });
    }
}

/// All matrices of a batch, and some of them: the others' memory stays as it was.
TEST_F(Fp8Transposed, CodesOfWeights) {
    struct Sizes {
        std::uint64_t batch, n, k, padding, first, count;
    };
    test::Random random(70);
    for (const Sizes& s : {Sizes{1, 1, 1, 0, 0, 1},
                           {1, 3, 200, 16, 0, 1},
                           {1, 300, 5, 0, 0, 1},
                           {1, 128, 256, 0, 0, 1},
                           {3, 67, 130, 0, 0, 3},
                           {4, 130, 67, 16, 1, 2},
                           {5, 16, 31, 0, 4, 1},
                           {2, 257, 129, 32, 1, 0}})
        for (const DType dtype : {DType::F8E4M3, DType::F8E5M2}) {
            const auto codes = [&](std::uint64_t rows, std::uint64_t columns) {
                const std::uint64_t stride = round_up(columns, 16) + s.padding;
                return s.batch == 1
                           ? empty(dtype, 2, {rows, columns}, {stride, 1})
                           : empty(dtype, 3, {s.batch, rows, columns}, {rows * stride, stride, 1});
            };
            Tensor x = codes(s.n, s.k);
            const Tensor y = codes(s.k, s.n);
            for (std::uint8_t& byte : x.bytes)
                byte = static_cast<std::uint8_t>(random.below(256));
            device().upload(x.buffer.view(), std::span<const std::uint8_t>(x.bytes));
            std::vector<std::uint8_t> expected = y.bytes;
            const std::uint64_t x_stride = x.view.stride[x.view.rank - 2],
                                y_stride = y.view.stride[y.view.rank - 2];
            for (std::uint64_t g = s.first; g < s.first + s.count; ++g)
                for (std::uint64_t row = 0; row < s.k; ++row)
                    for (std::uint64_t column = 0; column < round_up(s.n, 16); ++column)
                        expected[(g * s.k + row) * y_stride + column] =
                            column < s.n ? x.bytes[(g * s.n + column) * x_stride + row] : 0;
            const auto part = [&](const TensorView& view) {
                return s.batch == 1 ? view : view.rows(s.first, s.count);
            };
            run([&](Recording& r) { fp8::transpose_codes(r, part(x.view), part(y.view)); });
            EXPECT_EQ(bytes(y), expected) << s.batch << " x " << s.n << " x " << s.k;
        }
    const Tensor x = empty(DType::F8E4M3, 2, {64, 32}, {32, 1}),
                 y = empty(DType::F8E5M2, 2, {32, 64}, {64, 1}),
                 wide = empty(DType::F8E4M3, 2, {64, 32}, {32, 1});
    refuses([&](Recording& r) { fp8::transpose_codes(r, x.view, y.view); }, "f8_e5m2 [32, 64]");
    refuses([&](Recording& r) { fp8::transpose_codes(r, x.view, wide.view); },
            "the transposed codes f8_e4m3 [64, 32]");
}

TEST_F(Fp8Transposed, SaysWhatDoesNotFit) {
    const std::uint64_t rows = 300, columns = 40;
    const Recipe recipe{.blocks = Blocks::Columns128};
    const Tensor x = matrix(DType::F32, 1, rows, columns, 0),
                 memory =
                     empty(DType::U8, 1, {fp8::transposed_bytes(recipe, {rows, columns})}, {1});
    const Transposed good = fp8::make_transposed(memory.view.buffer, recipe, {rows, columns});
    const auto refused = [&](auto&& change, const std::string& part) {
        Transposed t = good;
        change(t);
        refuses([&](Recording& r) { fp8::quantize(r, x.view, t); }, part);
    };
    refused([](Transposed& t) { t.recipe.blocks = Blocks::Rows128; }, "wanted are 128x1 blocks");
    refused([](Transposed& t) { t.recipe.format = Format::E5M2; }, "the recipe is e5m2");
    refused([](Transposed& t) { t.rows = 299; }, "the transposed codes are of 299 rows");
    refused([](Transposed& t) { t.codes.extent[1] = 256; }, "wanted are [40, 384], contiguous");
    refused([](Transposed& t) { t.codes = t.codes.rows(0, 39); }, "wanted are [40, 384]");
    refused([](Transposed& t) { t.scales = t.scales.rows(0, 2); }, "wanted are f32 [3, 40]");
    refused([](Transposed& t) { t.codes.buffer.offset += 4; }, "not at a multiple of 16");
    const Buffer offsets = words({0, 100, 300});
    refused([&](Transposed& t) { t.group_offsets = offsets.tensor(DType::U32, {3}); },
            "wanted are [40, 512]");
    refuses(
        [&](Recording& r) { fp8::quantize(r, matrix(DType::F32, 2, rows, columns, 0).view, good); },
        "wanted are 2 dimensions");
    refuses(
        [&](Recording& r) {
            fp8::requantize(r, make_case(recipe, 1, rows, columns).quantized, good);
        },
        "wanted are 1x128 blocks");
    EXPECT_THROW(fp8::make_transposed(memory.view.buffer.sub(0, 4096), recipe, {rows, columns}),
                 Error);
}

} // namespace
} // namespace bellows
