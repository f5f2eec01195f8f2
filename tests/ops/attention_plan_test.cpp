// SPDX-License-Identifier: MIT
// Tiles of attention on matrix units: the host's formula for their workgroup memory against the
// kernels' SPIR-V, and which heads and devices they serve. No device is needed.

#include "engine/ops/attention_tile.hpp"
#include "support/shared_bytes.hpp"

#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

namespace bellows {
namespace {

using ops::attention_tile;
using ops::AttentionTile;
using testing::device_of;
using testing::SharedBytes;

GemmClass units_of(MatrixShape shape) {
    GemmClass units;
    units.units = GemmClass::Units::BF16;
    units.shape = shape;
    return units;
}

template <class Kernel>
void check_kernel(const AttentionTile& tile, const DeviceInfo& info, std::uint32_t qk_dim,
                  std::uint32_t v_dim) {
    Kernel kernel;
    kernel.constants = {.local_size = tile.local_size(info),
                        .mma_m = tile.shape.m,
                        .mma_n = tile.shape.n,
                        .mma_k = tile.shape.k,
                        .warps = tile.warps,
                        .block = AttentionTile::kBlock,
                        .qk_dim = qk_dim,
                        .v_dim = v_dim,
                        .in_lane = tile.in_lane ? 1u : 0u};
    const auto values = kernel.constant_values();
    for (const KernelVariant& variant : Kernel::info().variants) {
        if (variant.spirv.empty()) {
            EXPECT_NE(variant.reason_not_built, "");
            continue;
        }
        const SharedBytes shared(variant.spirv, {values.begin(), values.end()});
        EXPECT_EQ(shared.variables, 1) << Kernel::info().name;
        EXPECT_EQ(shared.bytes, tile.shared_bytes(qk_dim, v_dim))
            << Kernel::info().name << "." << variant.name << ", " << tile.warps << " subgroups";
    }
}

TEST(AttentionPlan, SharedMemoryIsWhatTheKernelsDeclare) {
    struct Case {
        DeviceInfo info;
        MatrixShape shape;
        std::uint32_t qk_dim, v_dim, warps;
        bool in_lane = false;
        std::uint64_t seq = 1000;
    };
    const Case cases[] = {{device_of(32, 48 << 10), {16, 16, 16}, 192, 128, 4},
                          {device_of(32, 32 << 10), {16, 16, 16}, 192, 128, 1},
                          {device_of(32, 48 << 10), {16, 16, 16}, 64, 256, 4},
                          {device_of(64, 64 << 10), {16, 16, 16}, 128, 128, 4},
                          {device_of(32, 64 << 10), {8, 16, 16}, 64, 64, 4},
                          {device_of(8, 32 << 10), {8, 8, 8}, 16, 8, 4},
                          {device_of(32, 48 << 10), {16, 16, 16}, 192, 128, 8, true},
                          {device_of(32, 48 << 10), {16, 16, 16}, 192, 128, 4, true, 64},
                          {device_of(32, 48 << 10), {16, 16, 16}, 192, 128, 1, true, 9},
                          {device_of(32, 32 << 10), {16, 16, 16}, 192, 128, 8, true},
                          {device_of(32, 32 << 10), {16, 16, 16}, 16, 16, 8, true}};
    MatrixSlots slots;
    slots.like_a.emplace();
    for (const Case& c : cases) {
        const auto tile = attention_tile(c.info, units_of(c.shape), c.qk_dim, c.v_dim, c.seq,
                                         c.in_lane ? std::optional(slots) : std::nullopt);
        ASSERT_TRUE(tile) << c.qk_dim << " and " << c.v_dim;
        EXPECT_EQ(tile->warps, c.warps) << c.qk_dim << " and " << c.v_dim;
        EXPECT_LE(tile->shared_bytes(c.qk_dim, c.v_dim), c.info.shared_memory_bytes);
        check_kernel<kernels::AttentionCoopmatForward>(*tile, c.info, c.qk_dim, c.v_dim);
        check_kernel<kernels::AttentionCoopmatGradQ>(*tile, c.info, c.qk_dim, c.v_dim);
        check_kernel<kernels::AttentionCoopmatGradK>(*tile, c.info, c.qk_dim, c.v_dim);
        check_kernel<kernels::AttentionCoopmatGradV>(*tile, c.info, c.qk_dim, c.v_dim);
    }
}

TEST(AttentionPlan, OtherHeadsAndDevicesAreForTheScalarKernels) {
    const GemmClass units = units_of({16, 16, 16});
    const DeviceInfo gpu = device_of(32, 48 << 10);
    EXPECT_FALSE(attention_tile(gpu, GemmClass{}, 64, 64, 64));
    EXPECT_FALSE(attention_tile(gpu, units, 72, 64, 64)) << "not a multiple of 16";
    EXPECT_FALSE(attention_tile(gpu, units, 64, 24, 64));
    EXPECT_FALSE(attention_tile(gpu, units, 576, 512, 64)) << "a block of 32 alone takes 68 KiB";
    DeviceInfo narrow = device_of(8, 48 << 10);
    narrow.is_cpu = false;
    EXPECT_FALSE(attention_tile(narrow, units, 16, 16, 64)) << "two rows to a lane";
    EXPECT_TRUE(attention_tile(narrow, units_of({8, 8, 8}), 16, 16, 64));
    DeviceInfo cpu = device_of(16, 48 << 10);
    cpu.is_cpu = true;
    EXPECT_EQ(attention_tile(cpu, units_of({16, 8, 8}), 16, 8, 64)->rows(), AttentionTile::kBlock);
    EXPECT_FALSE(attention_tile(device_of(8, 48 << 10), units_of({8, 8, 8}), 16, 16, 64))
        << "too much to compile for a CPU";
    EXPECT_FALSE(attention_tile(device_of(128, 48 << 10), units, 64, 64, 64))
        << "8 lanes, 32 columns";
}

} // namespace
} // namespace bellows
