// SPDX-License-Identifier: MIT
// Dense and grouped matrix products against the f64 reference: every storage, odd sizes, tails,
// row gaps, batches, accumulation, empty groups, in every numeric class that the device has. (The
// operands' values are exact in f16 or so small that it does not show.)

#include "reference/gemm.hpp"
#include "support/op_test.hpp"

#include <bellows/engine/gemm.hpp>

namespace bellows {
namespace {

using reference::Vector;
using test::elements_match;
using test::to_double;
using testing::OpTensor;

enum class Form { Nt, Nn, Tn };

struct GemmShape {
    std::uint64_t batch, m, n, k, gap; ///< gap: elements between rows that are not the matrix's
};

const GemmShape kShapes[] = {
    {0, 1, 1, 1, 0},    {0, 3, 5, 7, 1},     {0, 33, 31, 65, 0},
    {0, 64, 64, 64, 0}, {0, 17, 40, 128, 4}, {0, 130, 36, 20, 8},
    {3, 9, 12, 16, 4},  {2, 5, 3, 11, 1},    {0, 40, 8, 0, 0},
};

struct GemmCase {
    Form form;
    GemmShape shape;
    DType a, b, d;
    bool accumulate;
};

std::vector<GemmCase> gemm_cases() {
    std::vector<GemmCase> cases;
    std::size_t number = 0;
    const DType types[] = {DType::F32, DType::BF16};
    for (const Form form : {Form::Nt, Form::Nn, Form::Tn}) {
        for (const GemmShape& shape : kShapes) {
            // Drivers compile each variant anew: f32 gets all shapes, the others two each.
            const std::size_t index = static_cast<std::size_t>(&shape - kShapes);
            for (std::size_t types_of = 0; types_of < 8; ++types_of) {
                if (types_of == 0 || index % 8 == types_of || (index + 3) % 8 == types_of) {
                    cases.push_back({form, shape, types[types_of & 1], types[types_of >> 1 & 1],
                                     types[types_of >> 2], number++ % 3 == 1});
                }
            }
        }
    }
    return cases;
}

/// What a class with matrix units adds: rows in groups of eight, also in a batch and with a tail.
const GemmShape kUnitsShapes[] = {{3, 24, 40, 32, 8}, {0, 48, 32, 24, 0}, {0, 136, 72, 104, 8}};

std::vector<GemmCase> units_cases() {
    std::vector<GemmCase> cases;
    for (const Form form : {Form::Nt, Form::Nn, Form::Tn}) {
        for (const DType d : {DType::F32, DType::BF16}) {
            for (const GemmShape& shape : kShapes) {
                cases.push_back({form, shape, DType::BF16, DType::BF16, d, cases.size() % 3 == 1});
            }
            for (const GemmShape& shape : kUnitsShapes) {
                cases.push_back({form, shape, DType::BF16, DType::BF16, d, cases.size() % 3 == 1});
            }
        }
    }
    return cases;
}

class OpsGemm : public testing::OpTest {
protected:
    void TearDown() override { use_gemm_class(device(), ""); }

    /// All classes of this device, its own first.
    static std::vector<GemmClass> classes() {
        std::vector<GemmClass> usable;
        for (const GemmClass& c : gemm_classes(device())) {
            if (c.why_not.empty()) {
                usable.push_back(c);
            }
        }
        return usable;
    }

    /// [batch,] rows, columns of rows that are `gap` longer (an even number for bf16).
    static OpTensor matrix(DType dtype, std::uint64_t batch, std::uint64_t rows,
                           std::uint64_t columns, std::uint64_t gap) {
        std::uint64_t ld = columns + gap;
        ld += dtype == DType::BF16 ? ld % 2 : 0;
        const std::uint64_t batches = batch == 0 ? 1 : batch;
        OpTensor whole = result(dtype, {batches, rows, ld});
        whole.view = ops::slice(whole.view, 2, 0, columns);
        if (batch == 0) {
            whole.view.rank = 2;
            whole.view.extent = {rows, columns, 0, 0};
            whole.view.stride = {ld, 1, 0, 0};
        }
        return whole;
    }
    static void expect_product(const std::vector<float>& actual, const Vector& expected,
                               const Vector& magnitudes, std::uint64_t k, DType storage,
                               const std::vector<std::uint64_t>& shape) {
        const double epsilon = storage == DType::BF16 ? 1.01 * 0x1p-8 : test::kF32Epsilon;
        EXPECT_TRUE(
            elements_match(actual, expected, shape, test::sum_bound(k + 2, magnitudes, epsilon)));
        EXPECT_LE(test::calc_diff(actual, expected), storage == DType::BF16 ? 1.5e-5 : 1e-9);
    }

    /// One product against the reference; draws its operands from `seed` on.
    static void check(const GemmCase& c, std::uint64_t& seed) {
        const auto [batch, m, n, k, gap] = c.shape;
        const std::uint64_t batches = batch == 0 ? 1 : batch;
        const bool a_by_k = c.form == Form::Tn, b_by_n = c.form == Form::Nt;
        SCOPED_TRACE("form " + std::to_string(static_cast<int>(c.form)) + " " +
                     std::to_string(batch) + "x" + std::to_string(m) + "x" + std::to_string(n) +
                     "x" + std::to_string(k) + " " + to_string(c.a) + " " + to_string(c.b) + " " +
                     to_string(c.d) + (c.accumulate ? " accumulate" : ""));
        const auto a = random(c.a, batches * m * k, seed++);
        const auto b = random(c.b, batches * n * k, seed++);
        const auto before = random(c.d, batches * m * n, seed++);
        const OpTensor a_t = matrix(c.a, batch, a_by_k ? k : m, a_by_k ? m : k, gap);
        const OpTensor b_t = matrix(c.b, batch, b_by_n ? n : k, b_by_n ? k : n, gap);
        const OpTensor d_t = matrix(c.d, batch, m, n, gap);
        write(a_t.view, a);
        write(b_t.view, b);
        if (c.accumulate) {
            write(d_t.view, before);
        }
        const float alpha = 0.75f;
        run([&](Recording& recording) {
            const auto op = c.form == Form::Nt   ? ops::gemm_nt
                            : c.form == Form::Nn ? ops::gemm_nn
                                                 : ops::gemm_tn;
            op(recording, a_t, b_t, d_t, c.accumulate, alpha);
        });
        Vector expected, magnitudes;
        for (std::uint64_t i = 0; i < batches; ++i) {
            const auto product = [&](bool absolute) {
                Vector x = to_double(a), y = to_double(b);
                x = Vector(x.begin() + static_cast<std::ptrdiff_t>(i * m * k),
                           x.begin() + static_cast<std::ptrdiff_t>((i + 1) * m * k));
                y = Vector(y.begin() + static_cast<std::ptrdiff_t>(i * n * k),
                           y.begin() + static_cast<std::ptrdiff_t>((i + 1) * n * k));
                if (absolute) {
                    x = reference::absolute(x);
                    y = reference::absolute(y);
                }
                return c.form == Form::Nt   ? reference::gemm_nt(x, y, m, n, k)
                       : c.form == Form::Nn ? reference::gemm_nn(x, y, m, n, k)
                                            : reference::gemm_tn(x, y, m, n, k);
            };
            for (const double value : product(false)) {
                expected.push_back(alpha * value);
            }
            for (const double value : product(true)) {
                magnitudes.push_back(alpha * value);
            }
        }
        if (c.accumulate) {
            reference::accumulate(expected, to_double(before));
            reference::accumulate(magnitudes, reference::absolute(to_double(before)));
        }
        expect_product(read(d_t), expected, magnitudes, k, c.d, {batches, m, n});
        const std::uint64_t ld = d_t.view.stride[d_t.view.rank - 2];
        const auto all = read(TensorView::contiguous(d_t.buffer.view(), c.d, {batches * m, ld}));
        for (std::size_t i = 0; i < all.size(); ++i) {
            if (i % ld >= n) {
                ASSERT_TRUE(testing::untouched(all[i])) << "column " << i % ld << " of D";
            }
        }
    }
};

TEST_F(OpsGemm, AllFormsShapesAndStoragesMatchTheReference) {
    std::uint64_t seed = 1;
    for (const GemmClass& c : classes()) {
        SCOPED_TRACE(c.name);
        use_gemm_class(device(), c.name);
        const bool units = c.units != GemmClass::Units::None;
        for (const GemmCase& one : units ? units_cases() : gemm_cases()) {
            check(one, seed);
            if (HasFailure()) {
                return;
            }
        }
    }
}

TEST_F(OpsGemm, ARowsBitsDoNotDependOnTheOthers) {
    const std::uint64_t m = 130, n = 152, k = 72;
    for (const GemmClass& c : classes()) {
        for (const DType dtype : {DType::F32, DType::BF16}) {
            SCOPED_TRACE(c.name + " " + to_string(dtype));
            use_gemm_class(device(), c.name);
            const OpTensor a = tensor(dtype, {m, k}, random(dtype, m * k, 1));
            const OpTensor b = tensor(dtype, {n, k}, random(dtype, n * k, 2));
            const OpTensor all = result(DType::F32, {m, n}), one = result(DType::F32, {1, n});
            run([&](Recording& recording) {
                ops::gemm_nt(recording, a, b, all);
                ops::gemm_nt(recording, a.view.rows(57, 1), b, one);
            });
            EXPECT_EQ(read(all.view.rows(57, 1)), read(one));
        }
    }
}

TEST_F(OpsGemm, GroupsMatchTheReference) {
    struct Case {
        std::vector<std::uint32_t> rows; ///< per group
        std::uint64_t n, k;
        DType act, weight;
    };
    const Case cases[] = {
        {{1}, 4, 4, DType::F32, DType::F32},
        {{0, 0, 0}, 8, 12, DType::F32, DType::F32},
        {{5, 0, 33, 1, 0, 64}, 36, 20, DType::F32, DType::F32},
        {{17, 100, 0, 3}, 13, 9, DType::F32, DType::F32},
        {{0, 16, 48, 7}, 64, 40, DType::BF16, DType::BF16},
        {{17, 100, 0, 3}, 14, 10, DType::BF16, DType::BF16},
        {{1, 0, 130, 40, 0}, 136, 72, DType::BF16, DType::BF16},
        {{5, 0, 33, 1, 0, 64}, 36, 20, DType::BF16, DType::F32},
    };
    for (const GemmClass& gemm_class : classes()) {
        use_gemm_class(device(), gemm_class.name);
        for (const Case& c : cases) {
            if (gemm_class.units != GemmClass::Units::None && c.weight != DType::BF16) {
                continue;
            }
            const std::uint64_t groups = c.rows.size(), capacity = 256;
            SCOPED_TRACE(gemm_class.name + " " + std::to_string(groups) + " groups, n " +
                         std::to_string(c.n));
            std::vector<std::uint32_t> offsets(groups + 1, 0);
            for (std::size_t g = 0; g < groups; ++g) {
                offsets[g + 1] = offsets[g] + c.rows[g];
            }
            const std::uint64_t rows = offsets.back();
            const auto head = [&](std::vector<float> values, std::uint64_t columns) {
                values.resize(rows * columns);
                return values;
            };
            // What stands behind the rows is NaN and must neither be used nor change.
            const OpTensor x = result(c.act, {capacity, c.k}), dy = result(c.act, {capacity, c.n});
            const auto x_values = random(c.act, rows * c.k, 1),
                       dy_values = random(c.act, rows * c.n, 2);
            const auto w_values = random(c.weight, groups * c.n * c.k, 3);
            write(x.view.rows(0, rows), x_values);
            write(dy.view.rows(0, rows), dy_values);
            const OpTensor w = tensor(c.weight, {groups, c.n, c.k}, w_values);
            const OpTensor offsets_t = tensor(DType::U32, {groups + 1}, offsets);
            const OpTensor y = result(c.act, {capacity, c.n}), dx = result(c.act, {capacity, c.k});
            const OpTensor dw = result(DType::F32, {groups, c.n, c.k});
            const Buffer scratch = workspace(ops::group_tiles_bytes(device(), capacity, groups));
            run([&](Recording& recording) {
                const ops::GroupTiles tiles = ops::make_group_tiles(
                    recording, offsets_t, capacity, {c.n, c.k, 0, 0}, scratch.view());
                ops::grouped_gemm_nt(recording, x, w, y, tiles);
                ops::grouped_gemm_nn(recording, dy, w, dx, tiles);
                ops::grouped_gemm_tn(recording, dy, x, dw, offsets_t);
            });
            Vector expected_y, expected_dx, expected_dw;
            for (std::size_t g = 0; g < groups; ++g) {
                const auto part = [](const std::vector<float>& values, std::uint64_t first,
                                     std::uint64_t count) {
                    const Vector all = to_double(values);
                    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(first);
                    return Vector(begin, begin + static_cast<std::ptrdiff_t>(count));
                };
                const Vector xg = part(x_values, offsets[g] * c.k, c.rows[g] * c.k);
                const Vector dyg = part(dy_values, offsets[g] * c.n, c.rows[g] * c.n);
                const Vector wg = part(w_values, g * c.n * c.k, c.n * c.k);
                const auto append = [](Vector& to, const Vector& from) {
                    to.insert(to.end(), from.begin(), from.end());
                };
                append(expected_y, reference::gemm_nt(xg, wg, c.rows[g], c.n, c.k));
                append(expected_dx, reference::gemm_nn(dyg, wg, c.rows[g], c.k, c.n));
                append(expected_dw, reference::gemm_tn(dyg, xg, c.n, c.k, c.rows[g]));
            }
            const auto bound = [&](std::uint64_t terms, DType dtype) {
                const auto number = static_cast<double>(terms);
                return testing::storage_bound(dtype, number, number);
            };
            EXPECT_TRUE(
                elements_match(head(read(y), c.n), expected_y, {rows, c.n}, bound(c.k, c.act)));
            EXPECT_TRUE(
                elements_match(head(read(dx), c.k), expected_dx, {rows, c.k}, bound(c.n, c.act)));
            EXPECT_TRUE(elements_match(read(dw), expected_dw, {groups, c.n, c.k},
                                       bound(rows + 1, DType::F32)));
            const auto all = read(y);
            for (std::size_t i = rows * c.n; i < all.size(); ++i) {
                ASSERT_TRUE(testing::untouched(all[i])) << i;
            }
        }
    }
}

TEST_F(OpsGemm, AGroupsRowsHaveTheBitsOfTheDenseProduct) {
    const std::vector<std::uint32_t> offsets = {0, 37, 37, 180, 200};
    const std::uint64_t groups = 4, rows = 200, n = 152, k = 88;
    for (const GemmClass& c : classes()) {
        SCOPED_TRACE(c.name);
        use_gemm_class(device(), c.name);
        const OpTensor x = tensor(DType::BF16, {rows, k}, random(DType::BF16, rows * k, 1));
        const OpTensor w =
            tensor(DType::BF16, {groups, n, k}, random(DType::BF16, groups * n * k, 2));
        const OpTensor offsets_t = tensor(DType::U32, {groups + 1}, offsets);
        const OpTensor grouped = result(DType::F32, {rows, n}),
                       dense = result(DType::F32, {rows, n});
        const Buffer scratch = workspace(ops::group_tiles_bytes(device(), rows, groups));
        run([&](Recording& recording) {
            const ops::GroupTiles tiles =
                ops::make_group_tiles(recording, offsets_t, rows, {n, 0, 0, 0}, scratch.view());
            ops::grouped_gemm_nt(recording, x, w, grouped, tiles);
            for (std::uint64_t g = 0; g < groups; ++g) {
                const std::uint64_t count = offsets[g + 1] - offsets[g];
                TensorView weight = ops::slice(w.view, 0, g, 1);
                weight.rank = 2;
                weight.extent = {n, k, 0, 0};
                weight.stride = {k, 1, 0, 0};
                ops::gemm_nt(recording, x.view.rows(offsets[g], count), weight,
                             dense.view.rows(offsets[g], count));
            }
        });
        EXPECT_EQ(read(grouped), read(dense));
    }
}

TEST_F(OpsGemm, GroupedProductsAccumulate) {
    const std::vector<std::uint32_t> offsets = {0, 21, 21, 60};
    const std::uint64_t groups = 3, rows = 60, n = 40, k = 24;
    for (const GemmClass& c : classes()) {
        SCOPED_TRACE(c.name);
        use_gemm_class(device(), c.name);
        const OpTensor x = tensor(DType::BF16, {rows, k}, random(DType::BF16, rows * k, 1));
        const OpTensor dy = tensor(DType::BF16, {rows, n}, random(DType::BF16, rows * n, 2));
        const OpTensor w =
            tensor(DType::BF16, {groups, n, k}, random(DType::BF16, groups * n * k, 3));
        const OpTensor offsets_t = tensor(DType::U32, {groups + 1}, offsets);
        const OpTensor y = result(DType::F32, {rows, n}), dx = result(DType::F32, {rows, k}),
                       dw = result(DType::F32, {groups, n, k});
        const Buffer scratch = workspace(ops::group_tiles_bytes(device(), rows, groups));
        const auto products = [&](bool accumulate) {
            run([&](Recording& recording) {
                const auto tiles =
                    ops::make_group_tiles(recording, offsets_t, rows, {n, k, 0, 0}, scratch.view());
                ops::grouped_gemm_nt(recording, x, w, y, tiles, accumulate);
                ops::grouped_gemm_nn(recording, dy, w, dx, tiles, accumulate);
                ops::grouped_gemm_tn(recording, dy, x, dw, offsets_t, accumulate);
            });
        };
        products(false);
        std::vector<std::vector<float>> once = {read(y), read(dx), read(dw)};
        for (std::uint64_t i = 0; i < n * k; ++i) {
            ASSERT_EQ(once[2][n * k + i], 0.0f) << "the gradient of a group without rows, at " << i;
        }
        products(true);
        for (auto& values : once) {
            for (float& value : values) {
                value *= 2; // exact
            }
        }
        EXPECT_EQ(read(y), once[0]);
        EXPECT_EQ(read(dx), once[1]);
        EXPECT_EQ(read(dw), once[2]);
    }
}

TEST_F(OpsGemm, SaysWhatDoesNotFit) {
    const OpTensor a = result(DType::F32, {4, 8}), b = result(DType::F32, {4, 9});
    const OpTensor d = result(DType::F32, {4, 4});
    Recording recording(device(), QueueRole::Compute, "refused");
    EXPECT_THROW(ops::gemm_nt(recording, a, b, d), Error);
    EXPECT_THROW(ops::gemm_nn(recording, a, a, d), Error);
    // Rows of bf16 results that begin in the middle of a word cannot be written.
    const OpTensor odd = result(DType::BF16, {4, 9});
    EXPECT_THROW(ops::gemm_nn(recording, d, b, odd), Error);
    EXPECT_EQ(recording.num_operations(), 0u);
}

} // namespace
} // namespace bellows
