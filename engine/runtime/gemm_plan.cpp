// SPDX-License-Identifier: MIT
#include <bellows/engine/gemm_plan.hpp>

#include "device_impl.hpp"
#include "matrices/cooperative_matrices.hpp"

#include <bellows/base/error.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cstdio>
#include <optional>

namespace bellows {

namespace {

constexpr std::uint32_t kPadding = 8; // elements between staged rows

/// Whether memory has k as the rows of an operand.
bool a_by_k(GemmForm form) {
    return form == GemmForm::TN;
}
bool b_by_k(GemmForm form) {
    return form != GemmForm::NT;
}

std::uint64_t staged_bytes(std::uint64_t extent, std::uint64_t block_k, bool by_k, bool turned) {
    return by_k && !turned ? 2 * block_k * (extent + kPadding) : 2 * extent * (block_k + kPadding);
}

/// A tile in elements: what each subgroup computes, how many there are.
struct Cut {
    std::uint32_t warp_rows, warp_columns, warps_m, warps_n, block_k, stages;
};

// The first that fits is used for the largest products, smaller ones for smaller products. The
// order is that of 4096 x 4096 x 4096 on an H200 (bench/README.md): few subgroups with 64 x 64
// elements each, one stage, so that several workgroups share a processor and hide each other's
// loads.
constexpr Cut kWide[] = {
    {64, 64, 2, 2, 32, 1}, // 128 x 128 by 4 subgroups, 20 KiB
    {64, 64, 2, 4, 32, 1}, // 128 x 256, 30 KiB
    {64, 64, 4, 2, 32, 1}, // 256 x 128, 30 KiB
    {64, 32, 2, 4, 64, 1}, // 128 x 128 by 8, deeper, 36 KiB
    {32, 64, 4, 4, 32, 1}, // 128 x 256 by 16, 30 KiB
    {64, 64, 2, 2, 32, 2}, // 128 x 128 by 4, 40 KiB
    {64, 32, 2, 4, 32, 2}, // 128 x 128 by 8, 40 KiB
    {64, 32, 2, 4, 32, 1}, // the same, 20 KiB
    {64, 64, 2, 4, 16, 2}, // 128 x 256, 36 KiB
    {32, 32, 2, 2, 32, 2}, // 64 x 64, 20 KiB
};
/// Subgroups of 8, as a CPU has them.
constexpr Cut kNarrow[] = {
    {16, 16, 2, 1, 16, 2},
    {8, 16, 2, 2, 16, 1},
};

std::optional<GemmTile> tile_of(const Cut& cut, const MatrixShape& shape, bool turned) {
    if (cut.warp_rows % shape.m != 0 || cut.warp_columns % shape.n != 0 ||
        cut.block_k % shape.k != 0)
        return std::nullopt;
    GemmTile tile;
    tile.shape = shape;
    tile.fragments_m = cut.warp_rows / shape.m;
    tile.fragments_n = cut.warp_columns / shape.n;
    tile.warps_m = cut.warps_m;
    tile.warps_n = cut.warps_n;
    tile.block_k = cut.block_k;
    tile.stages = cut.stages;
    tile.turn = turned ? 1 : 0;
    return tile;
}

const char* name_of(GemmClass::Units units) {
    return units == GemmClass::Units::BF16 ? "bf16" : "f16";
}

/// The largest matrices of the device that the kernels serve.
std::optional<MatrixShape> matrix_shape(const DeviceInfo& info, GemmClass::Units units) {
    std::optional<MatrixShape> best;
    for (const MatrixShape& s : matrix_shapes(info, units)) {
        const auto size = [](const MatrixShape& x) { return std::uint64_t{x.m} * x.n * x.k; };
        if (!best || size(s) > size(*best))
            best = s;
    }
    return best;
}

constexpr GemmForm kForms[] = {GemmForm::NT, GemmForm::NN, GemmForm::TN};

/// The tiles of a class with matrix units; nothing when some product would have none.
std::optional<detail::GemmChoice> tiles_for(const DeviceInfo& info, const GemmClass& gemm_class) {
    detail::GemmChoice choice;
    choice.gemm_class = gemm_class;
    for (const GemmForm form : kForms)
        choice.tiles[static_cast<std::size_t>(form)] = gemm_tiles(info, gemm_class, form);
    const auto& nt = choice.of(GemmForm::NT);
    const auto& nn = choice.of(GemmForm::NN);
    const auto& tn = choice.of(GemmForm::TN);
    if (tn.empty())
        return std::nullopt;
    for (const GemmTile& a : nt)
        for (const GemmTile& b : nn)
            if (a.rows() == group_tile_rows(info) && a.rows() == b.rows() &&
                a.columns() == b.columns() && a.columns() % 32 == 0) {
                choice.group_tile = {a, b, tn.front()};
                return choice;
            }
    return std::nullopt;
}

GemmClass units_class(const Device& device, GemmClass::Units units) {
    GemmClass c;
    c.units = units;
    c.name = std::string("coopmat-") + name_of(units);
    using Variant = kernels::GemmCoopmatNt::Variant;
    const auto variant = units == GemmClass::Units::BF16 ? Variant::bf16_f32 : Variant::f16_f32;
    const auto shape = matrix_shape(device.info(), units);
    if (shape) {
        c.shape = *shape;
        c.name += "-k" + std::to_string(shape->k);
    }
    c.why_not = device.why_not(kernels::GemmCoopmatNt::info(), static_cast<std::uint32_t>(variant));
    if (c.why_not.empty() && !shape)
        c.why_not = std::string("the device has no subgroup matrices of ") + name_of(units) +
                    " with f32 sums whose sides are multiples of 8";
    if (!c.why_not.empty())
        return c;
    if (!tiles_for(device.info(), c))
        c.why_not = "no tile fits subgroups of " + std::to_string(device.info().subgroup_size) +
                    " and " + std::to_string(device.info().shared_memory_bytes) +
                    " bytes of workgroup memory";
    return c;
}

/// The class of a device's own code. `c` is the class of bf16 units, which compute what that code
/// does not take.
GemmClass native_class(const Device& device, GemmClass c) {
    c.name = "wgmma-bf16";
    c.native = true;
    using Variant = kernels::HopperGemm::Variant;
    constexpr auto kSmallest = static_cast<std::uint32_t>(Variant::nt_64);
    if (c.why_not.empty())
        c.why_not = device.why_not(kernels::HopperGemm::info(), kSmallest);
    if (c.why_not.empty())
        try { // an older driver may not take the code
            device.impl().kernels->function(kernels::HopperGemm::info(), kSmallest);
        } catch (const Error& error) {
            c.why_not = "the driver does not take its kernels: " + error.message();
        }
    return c;
}

/// The class of matrices of whole workgroups; `c` as for native_class.
GemmClass workgroup_class(const Device& device, GemmClass c) {
    c.name = "coopmat2-bf16";
    c.workgroup = true;
    using Variant = kernels::GemmCoopmat2Nt::Variant;
    if (c.why_not.empty())
        c.why_not = device.why_not(kernels::GemmCoopmat2Nt::info(),
                                   static_cast<std::uint32_t>(Variant::f32));
    if (!c.why_not.empty())
        return c;
    const std::uint32_t columns =
        tiles_for(device.info(), c).value().grouped(GemmForm::NT).columns();
    if (columns != detail::WorkgroupTile::kWide)
        c.why_not =
            "tiles of grouped products are " + std::to_string(columns) + " wide on this device";
    return c;
}

} // namespace

std::uint32_t GemmTile::local_size(const DeviceInfo& info) const {
    return info.subgroup_size * warps_m * warps_n;
}

std::uint64_t GemmTile::shared_bytes(GemmForm form) const {
    const std::uint64_t a = stages * staged_bytes(rows(), block_k, a_by_k(form), turn != 0);
    const std::uint64_t b = stages * staged_bytes(columns(), block_k, b_by_k(form), turn != 0);
    const std::uint64_t d = std::uint64_t{4} * warps_m * warps_n * shape.m * shape.n;
    return std::max(a, d) + b;
}

std::string GemmTile::why_not(const DeviceInfo& info, GemmForm form) const {
    const std::uint64_t invocations = local_size(info);
    if (invocations > info.max_workgroup_invocations)
        return "it needs " + std::to_string(invocations) + " invocations, the device has " +
               std::to_string(info.max_workgroup_invocations);
    if (shared_bytes(form) > info.shared_memory_bytes)
        return "it needs " + std::to_string(shared_bytes(form)) +
               " bytes of workgroup memory, the device has " +
               std::to_string(info.shared_memory_bytes);
    const auto shared_out = [&](std::uint64_t extent, bool by_k) {
        const std::uint64_t octets = extent * block_k / 8;
        return octets % (by_k && turn != 0 ? 2 * invocations : invocations) == 0;
    };
    if (!shared_out(rows(), a_by_k(form)) || !shared_out(columns(), b_by_k(form)))
        return "its blocks cannot be shared out evenly among " + std::to_string(invocations) +
               " invocations";
    return "";
}

std::string GemmTile::describe() const {
    return std::to_string(rows()) + "x" + std::to_string(columns()) + "x" +
           std::to_string(block_k) + ", " + std::to_string(stages) +
           (stages == 1 ? " stage, " : " stages, ") + std::to_string(warps_m) + "x" +
           std::to_string(warps_n) + " subgroups" + (turn != 0 ? ", turned" : "");
}

std::vector<MatrixShape> matrix_shapes(const DeviceInfo& info, GemmClass::Units units) {
    const std::string prefix = std::string("coopmat_") + name_of(units) + "_f32_";
    std::vector<MatrixShape> shapes;
    for (const std::string& feature : info.features) {
        MatrixShape s;
        if (feature.rfind(prefix, 0) == 0 &&
            std::sscanf(feature.c_str() + prefix.size(), "%ux%ux%u", &s.m, &s.n, &s.k) == 3 &&
            s.m != 0 && s.n != 0 && s.k != 0 && s.m % 8 == 0 && s.n % 8 == 0 && s.k % 8 == 0)
            shapes.push_back(s);
    }
    return shapes;
}

std::vector<GemmTile> gemm_tiles(const DeviceInfo& info, const GemmClass& gemm_class,
                                 GemmForm form) {
    std::vector<GemmTile> tiles;
    if (gemm_class.units == GemmClass::Units::None)
        return tiles;
    const auto add = [&](const auto& cuts) {
        for (const Cut& cut : cuts)
            for (const bool turned : {false, true}) {
                if (turned && form == GemmForm::NT)
                    continue; // nothing to turn
                const auto tile = tile_of(cut, gemm_class.shape, turned);
                if (tile && tile->why_not(info, form).empty())
                    tiles.push_back(*tile);
            }
    };
    if (info.subgroup_size >= 16)
        add(kWide);
    else
        add(kNarrow);
    return tiles;
}

std::vector<GemmClass> gemm_classes(const Device& device) {
    const GemmClass bf16 = units_class(device, GemmClass::Units::BF16);
    std::vector<GemmClass> classes = {native_class(device, bf16), bf16, GemmClass{},
                                      units_class(device, GemmClass::Units::F16)};
    // No CPU is known on which larger matrices are faster.
    classes.insert(device.info().is_cpu ? classes.end() : classes.begin() + 1,
                   workgroup_class(device, bf16));
    const auto taken = std::find_if(classes.begin(), classes.end(),
                                    [](const GemmClass& c) { return c.why_not.empty(); });
    std::rotate(classes.begin(), taken, taken + 1);
    return classes;
}

const GemmClass& gemm_class(const Device& device) {
    return device.impl().gemm.gemm_class;
}

void use_gemm_class(Device& device, std::string_view name) {
    detail::choose_gemm_class(device.impl(), name);
}

void force_gemm_tile(Device& device, GemmForm form, const GemmTile& tile) {
    const std::string reason = tile.why_not(device.info(), form);
    detail::GemmChoice& choice = device.impl().gemm;
    if (choice.of(form).empty() || !reason.empty())
        throw Error(ErrorCode::Unsupported,
                    "tiles of " + tile.describe() + " do not serve on " + device.info().name +
                        ": " + (reason.empty() ? "no matrix units are in use" : reason));
    const auto index = static_cast<std::size_t>(form);
    choice.tiles[index] = {tile};
    if (form == GemmForm::TN || tile.rows() == group_tile_rows(device.info()))
        choice.group_tile[index] = tile;
}

std::uint32_t group_tile_rows(const DeviceInfo& info) noexcept {
    return info.is_cpu ? 16 : 128;
}

namespace detail {

void choose_gemm_class(Device::Impl& impl, std::string_view name) {
    const std::vector<GemmClass> classes = gemm_classes(impl.self);
    auto chosen = classes.begin();
    if (!name.empty())
        chosen = std::find_if(classes.begin(), classes.end(),
                              [&](const GemmClass& c) { return c.name == name; });
    if (chosen == classes.end() || !chosen->why_not.empty()) {
        std::string text = "products of bf16 tensors cannot have the class \"" + std::string(name) +
                           "\" on " + impl.info.name + ". Classes:";
        for (const GemmClass& c : classes)
            text += "\n  " + c.name + (c.why_not.empty() ? "" : ": " + c.why_not);
        throw Error(ErrorCode::Unsupported, text);
    }
    if (chosen->units == GemmClass::Units::None)
        impl.gemm = GemmChoice{*chosen, {}, {}};
    else
        impl.gemm = tiles_for(impl.info, *chosen).value();
}

} // namespace detail

} // namespace bellows
