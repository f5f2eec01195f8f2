// SPDX-License-Identifier: MIT
// Numeric classes of products: which one a device takes and why not the others, that tiles of
// matrix units do not show in the bits, that f32 tensors never see matrix units.

#include "support/op_test.hpp"

#include <bellows/engine/gemm.hpp>

#include <algorithm>

namespace bellows {
namespace {

using testing::OpTensor;

class OpsGemmClass : public testing::OpTest {
protected:
    void TearDown() override { use_gemm_class(device(), ""); }

    static void gemm(Recording& recording, GemmForm form, const TensorView& a, const TensorView& b,
                     const TensorView& d) {
        const auto op = form == GemmForm::NT   ? ops::gemm_nt
                        : form == GemmForm::NN ? ops::gemm_nn
                                               : ops::gemm_tn;
        op(recording, a, b, d, false, 1.0f);
    }

    /// D of reproducible operands as it is computed now.
    static std::vector<float> product(GemmForm form, DType dtype, std::uint64_t m, std::uint64_t n,
                                      std::uint64_t k) {
        const bool tn = form == GemmForm::TN, nt = form == GemmForm::NT;
        const OpTensor a = tensor(dtype, {tn ? k : m, tn ? m : k}, random(dtype, m * k, 1));
        const OpTensor b = tensor(dtype, {nt ? n : k, nt ? k : n}, random(dtype, n * k, 2));
        const OpTensor d = result(DType::F32, {m, n});
        run([&](Recording& recording) { gemm(recording, form, a, b, d); });
        return read(d);
    }
};

TEST_F(OpsGemmClass, TheDevicesOwnComesFirstAndEveryOtherSaysWhyNot) {
    const std::vector<GemmClass> classes = gemm_classes(device());
    ASSERT_EQ(classes.size(), 5u);
    EXPECT_EQ(classes[0].name, gemm_class(device()).name);
    EXPECT_EQ(classes[0].why_not, "");
    const bool has_matrices = !device().info().cooperative_matrices.empty();
    for (const GemmClass& c : classes) {
        if (c.units == GemmClass::Units::None) {
            EXPECT_EQ(c.name, "f32-sequential");
            EXPECT_EQ(c.why_not, "");
            continue;
        }
        if (!has_matrices) {
            EXPECT_NE(c.why_not, "") << c.name;
        }
        if (c.why_not.empty()) {
            use_gemm_class(device(), c.name);
            EXPECT_EQ(gemm_class(device()).name, c.name);
            continue;
        }
        try {
            use_gemm_class(device(), c.name);
            ADD_FAILURE() << c.name << " was taken";
        } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::Unsupported);
            EXPECT_NE(std::string(error.what()).find(c.why_not), std::string::npos) << error.what();
        }
    }
    // f16 loses bits of bf16: nothing takes it by itself.
    use_gemm_class(device(), "");
    EXPECT_NE(gemm_class(device()).units, GemmClass::Units::F16);
    EXPECT_THROW(use_gemm_class(device(), "fastest"), Error);
    EXPECT_EQ(gemm_class(device()).name, classes[0].name);
}

TEST_F(OpsGemmClass, CanBeForcedWhenTheDeviceIsMade) {
    DeviceOptions options = testing::test_options();
    options.gemm_class = "f32-sequential";
    EXPECT_EQ(gemm_class(*testing::make_device(options)).name, "f32-sequential");
    options.gemm_class = "f64-by-hand";
    EXPECT_THROW(testing::make_device(options), Error);
}

TEST_F(OpsGemmClass, MatricesOfWorkgroupsComeBehindNativeCodeAndCanBeLeftOut) {
    const auto find = [](const Device& on) {
        const auto classes = gemm_classes(on);
        return *std::find_if(classes.begin(), classes.end(),
                             [](const GemmClass& c) { return c.name == "coopmat2-bf16"; });
    };
    DeviceOptions options = testing::test_options();
    options.gemm_class = "";
    options.leave_out = {"nvidia_binary_import"};
    const auto without_native = testing::make_device(options);
    const GemmClass found = find(*without_native);
    EXPECT_TRUE(found.workgroup);
    EXPECT_EQ(gemm_class(*without_native).workgroup,
              found.why_not.empty() && !without_native->info().is_cpu);
    options.leave_out = {"nvidia_binary_import", "coopmat2_bf16_f32"};
    const auto without = testing::make_device(options);
    EXPECT_NE(find(*without).why_not, "");
    if (found.why_not.empty()) {
        EXPECT_EQ(find(*without).why_not, "the device lacks coopmat2_bf16_f32");
    }
    EXPECT_FALSE(gemm_class(*without).workgroup);
    EXPECT_THROW(use_gemm_class(*without, "coopmat2-bf16"), Error);
}

TEST_F(OpsGemmClass, ProductsOfF32TensorsAreTheSameInEveryClass) {
    use_gemm_class(device(), "f32-sequential");
    const auto expected = product(GemmForm::NT, DType::F32, 40, 48, 96);
    for (const GemmClass& c : gemm_classes(device())) {
        if (!c.why_not.empty()) {
            continue;
        }
        use_gemm_class(device(), c.name);
        EXPECT_EQ(product(GemmForm::NT, DType::F32, 40, 48, 96), expected) << c.name;
    }
}

/// Two by four subgroups of two by two matrices each, whatever the device's own tiles are.
GemmTile many_subgroups(const GemmClass& c) {
    GemmTile tile;
    tile.shape = c.shape;
    tile.fragments_m = tile.fragments_n = 2;
    tile.block_k = 2 * c.shape.k;
    return tile;
}

TEST_F(OpsGemmClass, EveryTileOfMatrixUnitsGivesTheSameBits) {
    struct Shape {
        std::uint64_t m, n, k;
    };
    for (const GemmClass& c : gemm_classes(device())) {
        if (c.units == GemmClass::Units::None || !c.why_not.empty()) {
            continue;
        }
        for (const GemmForm form : {GemmForm::NT, GemmForm::NN, GemmForm::TN}) {
            for (const Shape& s : {Shape{200, 264, 104}, Shape{67, 45, 37}}) {
                use_gemm_class(device(), c.name);
                const auto expected = product(form, DType::BF16, s.m, s.n, s.k);
                auto tiles = gemm_tiles(device().info(), c, form);
                EXPECT_GE(tiles.size(), 2u);
                tiles.push_back(many_subgroups(c));
                if (s.k % 8 != 0) { // the other path of loads and stores; drivers take seconds each
                    tiles.erase(tiles.begin(), tiles.end() - 1);
                }
                for (const GemmTile& tile : tiles) {
                    force_gemm_tile(device(), form, tile);
                    EXPECT_EQ(product(form, DType::BF16, s.m, s.n, s.k), expected)
                        << c.name << ", form " << static_cast<int>(form) << ", " << tile.describe()
                        << ", " << s.m << " x " << s.n << " x " << s.k;
                }
            }
        }
    }
}

TEST_F(OpsGemmClass, AWorkListOfAnotherWidthIsRefused) {
    const auto classes = gemm_classes(device());
    const auto units = std::find_if(classes.begin(), classes.end(), [](const GemmClass& c) {
        return c.units != GemmClass::Units::None && c.why_not.empty();
    });
    const OpTensor x = result(DType::BF16, {8, 16}), w = result(DType::BF16, {1, 24, 16}),
                   y = result(DType::BF16, {8, 24});
    const OpTensor offsets = tensor(DType::U32, {2}, std::vector<std::uint32_t>{0, 8});
    const Buffer scratch = workspace(ops::group_tiles_bytes(device(), 8, 1));
    Recording recording(device(), QueueRole::Compute, "refused");
    if (units != classes.end()) {
        use_gemm_class(device(), units->name);
    }
    ops::GroupTiles tiles =
        ops::make_group_tiles(recording, offsets, 8, {24, 0, 0, 0}, scratch.view());
    tiles.width_on_units += 1;
    EXPECT_THROW(ops::grouped_gemm_nt(recording, x, w, y, tiles), Error);
}

} // namespace
} // namespace bellows
