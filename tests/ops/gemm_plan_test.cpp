// SPDX-License-Identifier: MIT
// The host's formula for the workgroup memory of kernels on matrix units against the declarations
// in their SPIR-V, evaluated for the constants of every tile. No device is needed.

#include "engine/runtime/gemm_choice.hpp"
#include "support/shared_bytes.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace bellows {
namespace {

using testing::device_of;
using testing::SharedBytes;

template <class Kernel>
Kernel with_tile(const GemmTile& tile, const DeviceInfo& info) {
    Kernel kernel;
    detail::set_tile(kernel.constants, tile, info);
    return kernel;
}

/// Number of modules looked at.
template <class Kernel>
int check_kernel(const DeviceInfo& info, const MatrixShape& shape, GemmForm form) {
    GemmClass units;
    units.units = GemmClass::Units::BF16;
    units.shape = shape;
    int modules = 0;
    for (const GemmTile& tile : gemm_tiles(info, units, form)) {
        const auto values = with_tile<Kernel>(tile, info).constant_values();
        for (const KernelVariant& variant : Kernel::info().variants) {
            if (variant.spirv.empty())
                continue; // the compiler lacked the extension; another of this list may exist
            const SharedBytes shared(variant.spirv, {values.begin(), values.end()});
            EXPECT_EQ(shared.variables, 2) << Kernel::info().name;
            EXPECT_EQ(shared.bytes, tile.shared_bytes(form))
                << Kernel::info().name << "." << variant.name << ", " << tile.describe();
            EXPECT_LE(shared.bytes, info.shared_memory_bytes);
            ++modules;
        }
    }
    return modules;
}

TEST(GemmPlan, SharedMemoryIsWhatTheKernelsDeclare) {
    struct Case {
        DeviceInfo info;
        MatrixShape shape;
    };
    const Case cases[] = {{device_of(32, 48 << 10), {16, 16, 16}},
                          {device_of(32, 64 << 10), {8, 16, 16}},
                          {device_of(8, 32 << 10), {8, 8, 8}}};
    for (const Case& c : cases) {
        int modules = check_kernel<kernels::GemmCoopmatNt>(c.info, c.shape, GemmForm::NT);
        modules += check_kernel<kernels::GemmCoopmatNn>(c.info, c.shape, GemmForm::NN);
        modules += check_kernel<kernels::GemmCoopmatTn>(c.info, c.shape, GemmForm::TN);
        modules += check_kernel<kernels::GroupedGemmCoopmatNt>(c.info, c.shape, GemmForm::NT);
        modules += check_kernel<kernels::GroupedGemmCoopmatNn>(c.info, c.shape, GemmForm::NN);
        modules += check_kernel<kernels::GroupedGemmCoopmatTn>(c.info, c.shape, GemmForm::TN);
        const KernelVariant& any = kernels::GemmCoopmatNt::info().variants.back();
        if (any.spirv.empty())
            EXPECT_NE(any.reason_not_built, "");
        else
            EXPECT_GT(modules, 0);
    }
}

TEST(GemmPlan, TilesKeepWithinTheDevicesLimits) {
    GemmTile tile; // 128 x 128 x 32, two stages
    EXPECT_EQ(tile.shared_bytes(GemmForm::NT), 2u * 2 * 256 * 40);
    EXPECT_EQ(tile.why_not(device_of(32, 48 << 10), GemmForm::NT), "");
    EXPECT_NE(tile.why_not(device_of(32, 32 << 10), GemmForm::NT).find("40960 bytes"),
              std::string::npos);
    tile.fragments_n = 4; // 128 x 256
    EXPECT_EQ(tile.shared_bytes(GemmForm::NN), 2u * 2 * (128 * 40 + 32 * 264));
    EXPECT_NE(tile.why_not(device_of(32, 48 << 10), GemmForm::NN), "");
    DeviceInfo few = device_of(32, 48 << 10);
    few.max_workgroup_invocations = 128;
    EXPECT_NE(GemmTile{}.why_not(few, GemmForm::NT).find("256 invocations"), std::string::npos);
    tile = GemmTile{};
    tile.block_k = 16;
    tile.fragments_m = 1; // 32 x 16 elements are no 256 octets
    EXPECT_NE(tile.why_not(device_of(32, 48 << 10), GemmForm::NT).find("evenly"),
              std::string::npos);
}

TEST(GemmPlan, AClassWithoutMatrixUnitsHasNoTiles) {
    EXPECT_TRUE(gemm_tiles(device_of(32, 48 << 10), GemmClass{}, GemmForm::NT).empty());
}

} // namespace
} // namespace bellows
