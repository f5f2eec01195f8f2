// SPDX-License-Identifier: MIT
// Quantisation against the definition, bit by bit: every recipe, both forms of the kernels, rows
// that are not there, groups, refusals. Unused bytes must keep their pattern.

#include "fp8/rig.hpp"

namespace bellows {
namespace {

using namespace testing;

class Fp8Quantize : public Fp8Test {
protected:
    struct Sizes {
        std::uint64_t batch, rows, columns, padding;
    };

    static void check(const Recipe& recipe, DType dtype, const Sizes& s, std::uint64_t seed,
                      std::uint64_t present, const std::vector<std::uint32_t>& starts = {}) {
        HostMatrix x = awkward_matrix(dtype, s.batch, s.rows, s.columns, seed);
        if (recipe.blocks == Blocks::PerTensor && seed % 3 != 0) // else all is NaN
            x = awkward_matrix(dtype, s.batch, s.rows, s.columns, seed, true);
        const Tensor in = upload(dtype, x, s.padding);
        const Buffer count = words({static_cast<std::uint32_t>(present)}), offsets = words(starts);
        const TensorView offsets_view =
            starts.empty() ? TensorView{} : offsets.tensor(DType::U32, {starts.size()});
        const TensorView view = present < s.rows ? in.view.with_row_count(count.view()) : in.view;
        for (const FormName& form : kForms) {
            Case c = make_case(recipe, s.batch, s.rows, s.columns, s.padding / 8, offsets_view);
            expect(c, x, present, starts);
            run([&](Recording& r) { fp8::quantize(r, view, c.quantized, form.form); });
            const std::string what = name(recipe, dtype, s.batch, s.rows, s.columns, form.name);
            expect_equal(c, what);
            if (recipe.blocks == Blocks::Columns128 && recipe.rule == ScaleRule::PowerOfTwo)
                expect_decoded(c, what, [&](Recording& r, const Decoded& y) {
                    fp8::quantize(r, view, y, form.form);
                });
            if (recipe.blocks == Blocks::Columns128 && s.batch == 1)
                expect_transposed(c, what, [&](Recording& r, const Transposed& t) {
                    fp8::quantize(r, view, t, form.form);
                });
            if (HasFailure())
                return;
        }
    }
};

TEST_F(Fp8Quantize, EveryRecipe) {
    std::uint64_t seed = 0;
    for (const Recipe& recipe : all_recipes())
        for (const DType dtype : {DType::F32, DType::BF16}) {
            check(recipe, dtype, {1, 137, 264, 8}, ++seed, 137);
            check(recipe, dtype, {1, 3, 640, 0}, ++seed, 3);
        }
}

TEST_F(Fp8Quantize, ScalesWhereTheirRoundingTurns) {
    const std::vector<float> maxima = test::critical_maxima();
    HostMatrix x{1, maxima.size(), 16, std::vector<float>(16 * maxima.size())};
    for (std::size_t row = 0; row < maxima.size(); ++row) {
        x.at(row, 3) = -maxima[row];
        x.at(row, 4) = maxima[row] / 3;
    }
    const Tensor in = upload(DType::F32, x, 0);
    for (const Format format : kFormats)
        for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
            for (const FormName& form : kForms) {
                const Recipe recipe{Blocks::Rows128, format, rule};
                Case c = make_case(recipe, 1, x.rows, x.columns);
                expect(c, x, x.rows);
                run([&](Recording& r) { fp8::quantize(r, in.view, c.quantized, form.form); });
                expect_equal(c, describe(recipe) + " " + form.name);
            }
}

TEST_F(Fp8Quantize, EveryNumberOfColumns) {
    std::uint64_t seed = 100;
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const std::uint64_t columns :
             {1u, 2u, 5u, 7u, 8u, 9u, 15u, 31u, 33u, 127u, 129u, 155u})
            for (const DType dtype : {DType::F32, DType::BF16})
                check({.blocks = blocks}, dtype, {1, 5, columns, columns % 2 * 8}, ++seed, 5);
}

TEST_F(Fp8Quantize, EveryNumberOfRows) {
    std::uint64_t seed = 200;
    for (const Blocks blocks : {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128})
        for (const std::uint64_t rows : {1u, 2u, 16u, 17u, 127u, 128u, 129u, 300u})
            check({.blocks = blocks}, DType::BF16, {1, rows, 40, 0}, ++seed, rows);
}

/// Where there are no integers of 64 bits.
class Fp8QuantizeIn32Bits : public Fp8Quantize {
protected:
    static void SetUpTestSuite() {
        DeviceOptions options = test_options();
        options.leave_out = {"int64"};
        set_up(options);
    }
};

TEST_F(Fp8QuantizeIn32Bits, RowsOfBf16) {
    ASSERT_FALSE(device().has_feature("int64"));
    std::uint64_t seed = 300;
    for (const Recipe& recipe : all_recipes())
        if (recipe.blocks == Blocks::Rows128 || recipe.blocks == Blocks::MX32)
            for (const std::uint64_t columns : {264u, 640u, 31u})
                check(recipe, DType::BF16, {1, 137, columns, 8}, ++seed, 137);
}

TEST_F(Fp8Quantize, Batches) {
    std::uint64_t seed = 300;
    for (const Recipe& recipe : all_recipes())
        check(recipe, DType::F32, {3, 130, 136, 8}, ++seed, 130);
}

TEST_F(Fp8Quantize, AbsentRowsAreLeftAlone) {
    std::uint64_t seed = 400;
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::PerTensor, Blocks::MX32})
        for (const std::uint64_t present : {1u, 5u, 128u, 131u, 199u})
            check({.blocks = blocks}, DType::BF16, {1, 200, 72, 8}, 3 * ++seed + 1, present);
}

TEST_F(Fp8Quantize, NoRowsAtAllWriteNothing) {
    for (const Blocks blocks :
         {Blocks::Rows128, Blocks::Columns128, Blocks::Blocks128, Blocks::MX32})
        check({.blocks = blocks}, DType::F32, {1, 20, 72, 0}, 1, 0);
}

TEST_F(Fp8Quantize, BlocksBeginAtEachGroup) {
    std::uint64_t seed = 500;
    const std::vector<std::vector<std::uint32_t>> layouts = {
        {0, 300},    {0, 5, 5, 133, 134, 300},      {0, 0, 0, 128, 256, 256}, {0, 127, 255, 299},
        {7, 9, 200}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}};
    for (const auto& starts : layouts)
        check({.blocks = Blocks::Columns128}, DType::BF16, {1, 300, 136, 8}, ++seed, 300, starts);
}

TEST_F(Fp8Quantize, RowsAndColumnsAtOnce) {
    std::uint64_t seed = 600;
    for (const Format format : kFormats)
        for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
            for (const DType dtype : {DType::F32, DType::BF16})
                for (const std::uint64_t present : {300u, 201u})
                    for (const FormName& form : kForms) {
                        const std::uint64_t rows = 300, columns = 200;
                        const HostMatrix x = awkward_matrix(dtype, 1, rows, columns, ++seed);
                        const Tensor in = upload(dtype, x, 8);
                        const Buffer count = words({static_cast<std::uint32_t>(present)});
                        Case by_row =
                            make_case({Blocks::Rows128, format, rule}, 1, rows, columns, 1);
                        Case by_column =
                            make_case({Blocks::Columns128, format, rule}, 1, rows, columns);
                        expect(by_row, x, present);
                        expect(by_column, x, present);
                        run([&](Recording& r) {
                            fp8::quantize_rows_and_columns(r, in.view.with_row_count(count.view()),
                                                           by_row.quantized, by_column.quantized,
                                                           form.form);
                        });
                        expect_equal(by_row, std::string("rows, ") + form.name);
                        expect_equal(by_column, std::string("columns, ") + form.name);
                    }
}

TEST_F(Fp8Quantize, RowsToColumns) {
    std::uint64_t seed = 700;
    const std::vector<std::uint32_t> starts = {0, 5, 5, 133, 134, 290};
    const Buffer offsets = words(starts);
    for (const Format format : kFormats)
        for (const ScaleRule rule : {ScaleRule::PowerOfTwo, ScaleRule::F32})
            for (const bool grouped : {false, true})
                for (const FormName& form : kForms) {
                    const std::uint64_t rows = 300, columns = 200, present = 290;
                    const HostMatrix x = awkward_matrix(DType::BF16, 1, rows, columns, ++seed);
                    const Tensor in = upload(DType::BF16, x, 0);
                    const Buffer count = words({static_cast<std::uint32_t>(present)});
                    Case by_row = make_case({Blocks::Rows128, format, rule}, 1, rows, columns);
                    expect(by_row, x, present);
                    by_row.quantized.codes.row_count = count.view();
                    const TensorView view =
                        grouped ? offsets.tensor(DType::U32, {starts.size()}) : TensorView{};
                    Case by_column = make_case({Blocks::Columns128, Format::E4M3, rule}, 1, rows,
                                               columns, 0, view);
                    expect(by_column, {1, rows, columns, by_row.values}, present,
                           grouped ? starts : std::vector<std::uint32_t>{});
                    run([&](Recording& r) {
                        fp8::quantize(r, in.view.with_row_count(count.view()), by_row.quantized);
                        fp8::requantize(r, by_row.quantized, by_column.quantized, form.form);
                    });
                    const std::string what = describe(by_row.quantized.recipe) + " to columns, " +
                                             form.name + (grouped ? ", grouped" : "");
                    expect_equal(by_column, what);
                    if (rule == ScaleRule::PowerOfTwo)
                        expect_decoded(by_column, what, [&](Recording& r, const Decoded& y) {
                            fp8::requantize(r, by_row.quantized, y, form.form);
                        });
                    expect_transposed(by_column, what, [&](Recording& r, const Transposed& t) {
                        fp8::requantize(r, by_row.quantized, t, form.form);
                    });
                }
}

/// Rows that stand by slots become the columns that they become where they have been gathered.
TEST_F(Fp8Quantize, RowsBySlotsToColumns) {
    const std::uint64_t tokens = 70, columns = 200, rows = 300;
    const std::uint32_t top_k = 5;
    const std::vector<std::uint32_t> starts = {0, 5, 5, 133, 134, 290};
    const Buffer offsets = words(starts);
    std::vector<std::uint32_t> slots(rows, ~0u);
    for (std::uint32_t row = 0; row < 290; ++row) // of 350, in no order
        slots[row] = row * 73 % 350;
    const Buffer of_rows = words(slots);
    std::uint64_t seed = 900;
    for (const Format format : kFormats)
        for (const FormName& form : kForms) {
            const HostMatrix x = awkward_matrix(DType::BF16, 1, tokens, columns, ++seed);
            const Tensor in = upload(DType::BF16, x, 0);
            Case by_row = make_case({Blocks::Rows128, format}, 1, tokens, columns);
            expect(by_row, x, tokens);
            HostMatrix gathered{1, rows, columns, std::vector<float>(rows * columns)};
            for (std::uint64_t row = 0; row < 290; ++row)
                for (std::uint64_t column = 0; column < columns; ++column)
                    gathered.values[row * columns + column] =
                        by_row.values[std::uint64_t{slots[row] / top_k} * columns + column];
            Case by_column = make_case({.blocks = Blocks::Columns128}, 1, rows, columns, 0,
                                       offsets.tensor(DType::U32, {starts.size()}));
            expect(by_column, gathered, 290, starts);
            const fp8::RowsBySlots by{of_rows.tensor(DType::I32, {slots.size()}), top_k};
            run([&](Recording& r) {
                fp8::quantize(r, in.view, by_row.quantized);
                fp8::requantize(r, by_row.quantized, by, by_column.quantized, form.form);
            });
            const std::string what = describe(by_row.quantized.recipe) + " by slots, " + form.name;
            expect_equal(by_column, what);
            expect_decoded(by_column, what, [&](Recording& r, const Decoded& y) {
                fp8::requantize(r, by_row.quantized, by, y, form.form);
            });
            expect_transposed(by_column, what, [&](Recording& r, const Transposed& t) {
                fp8::requantize(r, by_row.quantized, by, t, form.form);
            });
        }
}

// Rows and columns of all magnitudes beside one another, rows and columns of zeros, here and there
// a NaN: with scales of rows as close to each other as f16 allows, and further apart.
TEST_F(Fp8Quantize, RowsToColumnsWhateverTheScales) {
    test::Random random(800);
    const auto power = [&](std::uint64_t binades) {
        return std::ldexp(1.0, -static_cast<int>(random.below(binades + 1)));
    };
    const std::uint64_t rows = 270, columns = 200;
    for (const int top : {-20, 0, 3, 60, 126})
        for (const std::uint64_t spread : {0u, 3u, 12u, 13u, 24u})
            for (const bool nans : {false, true}) {
                HostMatrix x{1, rows, columns, std::vector<float>(rows * columns)};
                std::vector<double> of_column(columns);
                for (double& factor : of_column)
                    factor = random.below(9) == 0 ? 0.0 : power(spread);
                for (std::uint64_t row = 0; row < rows; ++row) {
                    const double of_row = random.below(7) == 0 ? 0.0 : power(spread);
                    for (std::uint64_t column = 0; column < columns; ++column) {
                        const double value = random.uniform(-1, 1) * power(18);
                        x.at(row, column) =
                            static_cast<float>(std::ldexp(of_row * of_column[column] * value, top));
                    }
                }
                for (std::uint64_t n = 0; nans && n < 5; ++n)
                    x.values[random.below(x.values.size())] = std::nanf("");
                const Tensor in = upload(DType::F32, x, 0);
                for (const FormName& form : kForms) {
                    Case by_row = make_case({}, 1, rows, columns);
                    expect(by_row, x, rows);
                    Case by_column = make_case({.blocks = Blocks::Columns128}, 1, rows, columns);
                    expect(by_column, {1, rows, columns, by_row.values}, rows);
                    run([&](Recording& r) {
                        fp8::quantize(r, in.view, by_row.quantized);
                        fp8::requantize(r, by_row.quantized, by_column.quantized, form.form);
                    });
                    const std::string what = std::string(form.name) + ", below 2^" +
                                             std::to_string(top) + ", over " +
                                             std::to_string(spread) + " binades";
                    expect_equal(by_column, what);
                    expect_decoded(by_column, what, [&](Recording& r, const Decoded& y) {
                        fp8::requantize(r, by_row.quantized, y, form.form);
                    });
                    expect_transposed(by_column, what, [&](Recording& r, const Transposed& t) {
                        fp8::requantize(r, by_row.quantized, t, form.form);
                    });
                }
            }
}

TEST_F(Fp8Quantize, SaysWhatDoesNotFit) {
    const std::uint64_t rows = 8, columns = 256;
    const Tensor x = matrix(DType::F32, 1, rows, columns, 0);
    const Case good = make_case({}, 1, rows, columns);
    const Case by_column = make_case({.blocks = Blocks::Columns128}, 1, rows, columns);
    refuses(
        [&](Recording& r) {
            Quantized q = good.quantized;
            q.recipe.blocks = Blocks::Blocks128;
            fp8::quantize(r, x.view, q);
        },
        "scales are f32 [8, 2], wanted are f32 [1, 2]");
    refuses(
        [&](Recording& r) {
            Quantized q = good.quantized;
            q.recipe.format = Format::E5M2;
            fp8::quantize(r, x.view, q);
        },
        "the recipe is e5m2 1x128");
    refuses([&](Recording& r) { fp8::quantize(r, x.view.rows(0, 4), good.quantized); },
            "wanted are 4 x 256");
    refuses(
        [&](Recording& r) {
            TensorView shifted = x.view.rows(0, 7);
            shifted.buffer.offset += 4;
            fp8::quantize(r, shifted, make_case({}, 1, 7, columns).quantized);
        },
        "not at a multiple of 16");
    refuses(
        [&](Recording& r) {
            TensorView narrow = x.view;
            narrow.stride[0] = 252;
            narrow.extent[1] = 252;
            fp8::quantize(r, narrow, make_case({}, 1, rows, 252).quantized);
        },
        "multiples of 8");
    refuses(
        [&](Recording& r) {
            Quantized q = good.quantized;
            q.group_offsets = words({0, 8}).tensor(DType::U32, {2});
            fp8::quantize(r, x.view, q);
        },
        "group_offsets go with 128x1 blocks");
    refuses(
        [&](Recording& r) {
            Quantized q = good.quantized;
            q.recipe = {.blocks = Blocks::MX32, .rule = ScaleRule::F32};
            fp8::quantize(r, x.view, q);
        },
        "power-of-two scales only");
    refuses([&](Recording& r) { fp8::requantize(r, by_column.quantized, by_column.quantized); },
            "wanted are 1x128 blocks");
    const Tensor y = matrix(DType::BF16, 1, rows, columns, 0);
    refuses([&](Recording& r) { fp8::quantize(r, x.view, Decoded{y.view, {}, {}}); },
            "values without codes are of 128x1 blocks");
    const Recipe of_columns{.blocks = Blocks::Columns128};
    refuses([&](Recording& r) { fp8::quantize(r, x.view, Decoded{x.view, of_columns, {}}); },
            "wanted are bf16 8 x 256");
    refuses(
        [&](Recording& r) {
            fp8::requantize(r, good.quantized, Decoded{y.view.rows(0, 4), of_columns, {}});
        },
        "the values are bf16 [4, 256]");
    refuses(
        [&](Recording& r) {
            fp8::quantize_rows_and_columns(r, x.view, good.quantized, good.quantized);
        },
        "wanted are 128x1 blocks");
    refuses(
        [&](Recording& r) {
            Quantized q = by_column.quantized;
            q.recipe.rule = ScaleRule::F32;
            fp8::quantize_rows_and_columns(r, x.view, good.quantized, q);
        },
        "must be the same");
    refuses(
        [&](Recording& r) {
            fp8::quantize(r, matrix(DType::U32, 1, rows, columns, 0).view, good.quantized);
        },
        "wanted is f32 or bf16");
}

} // namespace
} // namespace bellows
