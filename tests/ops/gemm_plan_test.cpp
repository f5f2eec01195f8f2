// SPDX-License-Identifier: MIT
// The host's formula for the workgroup memory of kernels on matrix units against the declarations
// in their SPIR-V, evaluated for the constants of every tile. No device is needed.

#include "../../engine/gemm_choice.hpp"

#include <bellows/engine/device.hpp>
#include <bellows/engine/gemm_plan.hpp>
#include <bellows/kernels/kernels.hpp>

#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace bellows {
namespace {

/// Bytes of all workgroup variables of a module whose specialisation constants have `values`.
/// Knows the types and operations that array sizes are made of; throws where one needs another.
class SharedBytes {
public:
    SharedBytes(std::span<const std::uint32_t> words, std::vector<std::uint32_t> values)
        : values_(std::move(values)) {
        for (std::size_t at = 5; at < words.size(); at += words[at] >> 16)
            visit(words[at] & 0xffff, words.subspan(at + 1, (words[at] >> 16) - 1));
    }
    std::uint64_t bytes = 0;
    int variables = 0;

private:
    using Id = std::uint32_t;
    using Words = std::span<const std::uint32_t>;

    void visit(std::uint32_t op, Words w) {
        switch (op) {
        case 71: // OpDecorate, SpecId
            if (w[1] == 1)
                spec_ids_[w[0]] = w[2];
            break;
        case 21: // OpTypeInt
        case 22: // OpTypeFloat
            sizes_[w[0]] = w[1] / 8;
            break;
        case 23:                       // OpTypeVector
            if (sizes_.contains(w[1])) // not so for vectors of booleans
                sizes_[w[0]] = sizes_.at(w[1]) * w[2];
            break;
        case 28: // OpTypeArray
            if (sizes_.contains(w[1]) && constants_.contains(w[2]))
                sizes_[w[0]] = sizes_.at(w[1]) * constants_.at(w[2]);
            break;
        case 32: // OpTypePointer, Workgroup
            if (w[1] == 4)
                pointees_[w[0]] = w[2];
            break;
        case 41: // OpConstantTrue
        case 42: // OpConstantFalse
            constants_[w[1]] = op == 41;
            break;
        case 43: // OpConstant
            constants_[w[1]] = w[2];
            break;
        case 50: // OpSpecConstant
            constants_[w[1]] = values_.at(spec_ids_.at(w[1]));
            break;
        case 52: // OpSpecConstantOp
            if (known(w))
                evaluate(w);
            break;
        case 59: // OpVariable, Workgroup
            if (w[2] == 4) {
                bytes += sizes_.at(pointees_.at(w[0]));
                ++variables;
            }
            break;
        default:
            break;
        }
    }
    bool known(Words w) const {
        for (std::size_t i = 3; i < w.size(); ++i)
            if (!constants_.contains(w[i]))
                return false;
        return true;
    }
    void evaluate(Words w) {
        const auto x = [&](std::size_t i) { return constants_.at(w[3 + i]); };
        std::uint32_t& result = constants_[w[1]];
        switch (w[2]) {
        case 128: // OpIAdd
            result = x(0) + x(1);
            break;
        case 132: // OpIMul
            result = x(0) * x(1);
            break;
        case 134: // OpUDiv
            result = x(0) / x(1);
            break;
        case 169: // OpSelect
            result = x(0) ? x(1) : x(2);
            break;
        case 171: // OpINotEqual
            result = x(0) != x(1);
            break;
        case 172: // OpUGreaterThan
            result = x(0) > x(1);
            break;
        default:
            constants_.erase(w[1]);
        }
    }

    std::vector<std::uint32_t> values_;
    std::map<Id, std::uint32_t> spec_ids_, constants_;
    std::map<Id, std::uint64_t> sizes_;
    std::map<Id, Id> pointees_;
};

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

DeviceInfo device_of(std::uint32_t subgroup_size, std::uint32_t shared_memory_bytes) {
    DeviceInfo info;
    info.is_cpu = subgroup_size == 8;
    info.subgroup_size = subgroup_size;
    info.shared_memory_bytes = shared_memory_bytes;
    info.max_workgroup_invocations = 1024;
    return info;
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
