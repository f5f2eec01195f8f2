// SPDX-License-Identifier: MIT
// Matrix products in every numeric class that the device has: what a row's bits depend on, grouped
// and dense alike, accumulation, refusals.

#include "support/op_test.hpp"

#include <bellows/engine/gemm.hpp>

#include <array>

namespace bellows {
namespace {

using testing::OpTensor;

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
};

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

TEST_F(OpsGemm, APartOfAProductIsTheProductOfTheParts) {
    // The whole has enough tiles of 128 x 128 for all processors of a GPU, and some at the edge;
    // the parts are small and off the tiles' borders. k is no multiple of what is unrolled or
    // staged.
    const std::uint64_t side = device().info().is_cpu ? 328 : 1640, k = 2 * 256 + 64 + 40;
    struct Part {
        std::uint64_t row, rows, column, columns;
    };
    const auto parts = std::to_array<Part>(
        {{136, 40, 200, 48}, {0, 1, 0, 8}, {0, 128, 128, 128}, {side - 24, 24, side - 136, 136}});
    for (const GemmClass& c : classes()) {
        for (const GemmForm form : {GemmForm::NT, GemmForm::NN, GemmForm::TN}) {
            use_gemm_class(device(), c.name);
            const bool tn = form == GemmForm::TN, nt = form == GemmForm::NT;
            const auto op = nt ? ops::gemm_nt : tn ? ops::gemm_tn : ops::gemm_nn;
            const OpTensor a = tensor(DType::BF16, {tn ? k : side, tn ? side : k},
                                      random(DType::BF16, side * k, 1));
            const OpTensor b = tensor(DType::BF16, {nt ? side : k, nt ? k : side},
                                      random(DType::BF16, side * k, 2));
            for (const DType dtype : {DType::F32, DType::BF16}) {
                const OpTensor whole = result(dtype, {side, side});
                run([&](Recording& recording) { op(recording, a, b, whole, false, 1.0f); });
                for (const Part& p : parts) {
                    if (tn && p.rows == 1) { // its rows of A are no multiple of 16 bytes
                        continue;
                    }
                    SCOPED_TRACE(c.name + ", form " + std::to_string(static_cast<int>(form)) +
                                 ", " + to_string(dtype) + ", " + std::to_string(p.rows) + " rows");
                    const TensorView d = ops::slice(ops::slice(whole.view, 0, p.row, p.rows), 1,
                                                    p.column, p.columns);
                    const OpTensor alone = result(dtype, {p.rows, p.columns});
                    run([&](Recording& recording) {
                        op(recording, ops::slice(a.view, tn ? 1 : 0, p.row, p.rows),
                           ops::slice(b.view, nt ? 0 : 1, p.column, p.columns), alone, false, 1.0f);
                    });
                    EXPECT_EQ(read(d), read(alone));
                }
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

TEST_F(OpsGemm, ATallProductIsTheSumOfItsRuns) {
    const std::uint64_t m = 8, n = 28;
    for (const std::uint64_t k : {1u, 128u, 129u, 256u, 700u})
        for (const DType dtype : {DType::F32, DType::BF16}) {
            SCOPED_TRACE(std::to_string(k) + " " + to_string(dtype));
            const auto a_values = random(DType::F32, k * m, k), b_values = random(dtype, k * n, 7);
            const OpTensor a = tensor(DType::F32, {k, m}, a_values),
                           b = tensor(dtype, {k, n}, b_values), d = result(DType::F32, {m, n}),
                           whole = result(DType::F32, {m, n});
            const Buffer scratch =
                workspace(std::max<std::uint64_t>(ops::gemm_tn_tall_workspace_bytes(k, m, n), 16));
            EXPECT_EQ(ops::gemm_tn_tall_workspace_bytes(k, m, n) > 0, k > 128);
            run([&](Recording& recording) {
                ops::gemm_tn(recording, a, b, whole);
                ops::gemm_tn_tall(recording, a, b, d, false, scratch.view());
            });
            const std::vector<float> once = read(d), expected = read(whole);
            for (std::uint64_t i = 0; i < m * n; ++i)
                ASSERT_NEAR(once[i], expected[i], 2e-6 * static_cast<double>(k)) << i;
            run([&](Recording& recording) {
                ops::gemm_tn_tall(recording, a, b, d, true, scratch.view());
            });
            const std::vector<float> twice = read(d);
            for (std::uint64_t i = 0; i < m * n; ++i)
                ASSERT_EQ(twice[i], 2 * once[i]) << i;
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
