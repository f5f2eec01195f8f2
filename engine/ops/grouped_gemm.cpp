// SPDX-License-Identifier: MIT
#include "gemm_launch.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>

namespace bellows::ops {

namespace {

/// Grids for the f32 kernels, then for those on matrix units (shaders/grouped_gemm_tiles.comp).
constexpr std::uint64_t kGridBytes = 12;
constexpr std::uint64_t kArgumentBytes = 2 * GroupTiles::kMaxShapes * kGridBytes;

std::uint64_t tiles_capacity(std::uint64_t max_rows, std::uint64_t groups,
                             std::uint32_t tile_rows) {
    return max_rows / tile_rows + groups;
}

/// The number of groups.
std::uint64_t check_ranges(const Arguments& arguments, const GroupRanges& rows) {
    arguments.rank("the groups' begins", rows.begins, 1);
    const std::uint64_t groups = rows.begins.extent[0];
    arguments.require(groups >= 1, "there must be at least one group");
    arguments.tensor("the groups' begins", rows.begins, DType::U32, {groups});
    arguments.tensor("the groups' ends", rows.ends, DType::U32, {groups});
    return groups;
}

BufferView memory_of(const TensorView& view) {
    return view.buffer.sub(0, view.num_bytes());
}

/// Columns of the tiles of kernels on matrix units, in units of kTileColumns; 1 without them.
std::uint32_t width_on_units(const Device& device, GemmForm form) {
    if (device.impl().gemm.of(form).empty())
        return 1;
    return static_cast<std::uint32_t>(device.impl().gemm.grouped(form).columns() / kTileColumns);
}

template <class K>
void dispatch_rows(Recording& recording, const Arguments& arguments, K kernel, const Matrix& b,
                   std::uint64_t n, std::uint64_t k, const GroupTiles& tiles, BufferView grid) {
    kernel.group_ends = memory_of(tiles.rows.ends);
    kernel.tiles = tiles.tiles;
    kernel.n = arguments.u32("N", n);
    kernel.k = arguments.u32("K", k);
    kernel.stride_b = arguments.u32("stride of B", b.batch_stride);
    recording.dispatch_indirect(kernel, grid);
}

template <class Scalar, class Units, class Workgroup>
void grouped_rows(Recording& recording, const Arguments& arguments, const TensorView& a,
                  const TensorView& b, const TensorView& d, GemmForm form, const GroupTiles& tiles,
                  bool accumulate, float alpha) {
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = result_matrix(arguments, d);
    const std::uint64_t groups = tiles.rows.ends.extent[0];
    const bool nt = form == GemmForm::NT;
    const std::uint64_t n = nt ? mb.rows : mb.columns, k = nt ? mb.columns : mb.rows;
    arguments.require(a.rank == 2 && d.rank == 2 && b.rank == 3 && mb.batch == groups &&
                          ma.columns == k && md.columns == n && ma.rows == md.rows,
                      "the shapes do not fit " + std::to_string(groups) + " groups: a " +
                          describe(a) + ", b " + describe(b) + ", d " + describe(d));
    const Device& device = recording.device();
    const bool on_units = on_matrix_units(device, ma, mb);
    const BufferView grid = tiles.grid(n, on_units);
    arguments.require(static_cast<bool>(grid),
                      "the work list was not made for N = " + std::to_string(n));
    arguments.require(tiles.tile_rows == group_tile_rows(device.info()) &&
                          tiles.width_on_units == width_on_units(device, form),
                      "the work list was made for another device or numeric class");
    if (on_native_units(device, ma, mb, md)) {
        using K = kernels::HopperGroupedGemm;
        using Variant = K::Variant;
        const NativeGrid native = native_grid(device, ma.rows, n, 1);
        K kernel = fill_native_gemm<K>(arguments, native, nt ? Variant::nt_256 : Variant::nn_256,
                                       nt ? Variant::nt_64 : Variant::nn_64, ma, mb, md, accumulate,
                                       alpha);
        kernel.group_ends = memory_of(tiles.rows.ends);
        kernel.tiles = tiles.tiles;
        kernel.grid = grid;
        kernel.rows = arguments.u32("rows", ma.rows);
        kernel.n = arguments.u32("N", n);
        kernel.k = arguments.u32("K", k);
        kernel.groups = arguments.u32("groups", groups);
        kernel.stride_b = arguments.u32("stride of B", mb.batch_stride);
        recording.dispatch(kernel, native.groups);
        return;
    }
    const GemmTile& tile = device.impl().gemm.grouped(form);
    // Another width is one that force_gemm_tile has set.
    if (on_workgroup_units(device, ma, mb, md) && tile.columns() == detail::WorkgroupTile::kWide) {
        Workgroup kernel = fill_workgroup_gemm<Workgroup>(arguments, detail::WorkgroupTile::kWide,
                                                          ma, mb, md, accumulate, alpha);
        kernel.rows = arguments.u32("rows", ma.rows);
        dispatch_rows(recording, arguments, kernel, mb, n, k, tiles, grid);
        return;
    }
    if (on_units) {
        dispatch_rows(
            recording, arguments,
            fill_units_gemm<Units>(arguments, device, tile, ma, mb, md, accumulate, alpha), mb, n,
            k, tiles, grid);
        return;
    }
    dispatch_rows(
        recording, arguments,
        fill_gemm<Scalar>(arguments, plan_grouped_gemm(device), ma, mb, md, accumulate, alpha), mb,
        n, k, tiles, grid);
}

/// Records the making of a list over tiles.rows by `kernel`, which has the rest.
template <class K>
void list_groups(Recording& recording, const Arguments& arguments, K kernel,
                 const GroupTiles& tiles) {
    fill_group_tiles(kernel, tiles);
    kernel.group_begins = memory_of(tiles.rows.begins);
    kernel.group_ends = memory_of(tiles.rows.ends);
    kernel.groups = arguments.u32("groups", tiles.rows.begins.extent[0]);
    recording.dispatch(kernel, {1});
}

} // namespace

BufferView GroupTiles::grid(std::uint64_t n, bool on_units) const {
    const auto shape = std::find(columns.begin(), columns.end(), n);
    if (shape == columns.end())
        return {};
    const auto index = static_cast<std::uint64_t>(shape - columns.begin());
    return arguments.sub(((on_units ? kMaxShapes : 0) + index) * kGridBytes, kGridBytes);
}

GroupRanges group_ranges(const TensorView& offsets) {
    const Arguments arguments("group_ranges");
    arguments.rank("offsets", offsets, 1);
    arguments.require(offsets.extent[0] >= 2, "offsets need at least two entries");
    arguments.tensor("offsets", offsets, DType::U32, {offsets.extent[0]});
    const std::uint64_t groups = offsets.extent[0] - 1;
    return {offsets.rows(0, groups), offsets.rows(1, groups)};
}

std::uint64_t group_tiles_bytes(const Device& device, std::uint64_t max_rows,
                                std::uint64_t groups) {
    const std::uint32_t tile_rows = group_tile_rows(device.info());
    return kArgumentBytes + tiles_capacity(max_rows, groups, tile_rows) * 8;
}

GroupTiles plan_group_tiles(const Arguments& arguments, const Device& device,
                            const GroupRanges& rows, std::uint64_t max_rows,
                            const std::array<std::uint64_t, GroupTiles::kMaxShapes>& columns,
                            BufferView memory) {
    const std::uint64_t groups = check_ranges(arguments, rows);
    arguments.workspace(memory, group_tiles_bytes(device, max_rows, groups));
    for (const std::uint64_t n : columns)
        arguments.u32("N", n);
    GroupTiles tiles;
    tiles.tile_rows = group_tile_rows(device.info());
    tiles.width_on_units = width_on_units(device, GemmForm::NT);
    tiles.rows = rows;
    tiles.arguments = memory.sub(0, kArgumentBytes);
    tiles.tiles = memory.sub(kArgumentBytes, tiles_capacity(max_rows, groups, tiles.tile_rows) * 8);
    tiles.columns = columns;
    return tiles;
}

GroupTiles make_group_tiles(Recording& recording, const GroupRanges& rows, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory) {
    const Arguments arguments("make_group_tiles");
    const GroupTiles tiles =
        plan_group_tiles(arguments, recording.device(), rows, max_rows, columns, memory);
    list_groups(recording, arguments, kernels::GroupedGemmTiles{}, tiles);
    return tiles;
}

GroupTiles make_group_tiles(Recording& recording, const GroupSource& source,
                            const GroupRanges& rows, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory) {
    const Arguments arguments("make_group_tiles");
    const GroupTiles tiles =
        plan_group_tiles(arguments, recording.device(), rows, max_rows, columns, memory);
    const std::uint64_t groups = rows.begins.extent[0];
    arguments.require(source.values.rank == 1 && source.values.extent[0] == groups &&
                          source.values.is_contiguous() && size_of(source.values.dtype) == 4,
                      "the source is " + describe(source.values) +
                          ", wanted is a word for each of " + std::to_string(groups) + " groups");
    kernels::GroupRangesTiles kernel;
    kernel.constants.by_count = source.counts ? 1 : 0;
    kernel.source = memory_of(source.values);
    kernel.rows = arguments.u32("rows", max_rows);
    kernel.spacing = arguments.u32("the spacing of groups", source.spacing);
    list_groups(recording, arguments, kernel, tiles);
    return tiles;
}

GroupTiles make_group_tiles(Recording& recording, const TensorView& offsets, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory) {
    return make_group_tiles(recording, group_ranges(offsets), max_rows, columns, memory);
}

void grouped_gemm_nt(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate, float alpha) {
    grouped_rows<kernels::GroupedGemmNt, kernels::GroupedGemmCoopmatNt,
                 kernels::GroupedGemmCoopmat2Nt>(recording, Arguments("grouped_gemm_nt"), a, b, d,
                                                 GemmForm::NT, tiles, accumulate, alpha);
}

void grouped_gemm_nn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate, float alpha) {
    grouped_rows<kernels::GroupedGemmNn, kernels::GroupedGemmCoopmatNn,
                 kernels::GroupedGemmCoopmat2Nn>(recording, Arguments("grouped_gemm_nn"), a, b, d,
                                                 GemmForm::NN, tiles, accumulate, alpha);
}

void grouped_gemm_tn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupRanges& rows, bool accumulate, float alpha) {
    const Arguments arguments("grouped_gemm_tn");
    const std::uint64_t groups = check_ranges(arguments, rows);
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = result_matrix(arguments, d);
    arguments.require(a.rank == 2 && b.rank == 2 && d.rank == 3 && md.batch == groups &&
                          ma.rows == mb.rows && md.rows == ma.columns && md.columns == mb.columns,
                      "the shapes do not fit " + std::to_string(groups) + " groups: a " +
                          describe(a) + ", b " + describe(b) + ", d " + describe(d));
    if (md.rows == 0 || md.columns == 0)
        return;
    const auto dispatch = [&](auto kernel, std::uint64_t tile_rows, std::uint64_t tile_columns) {
        kernel.group_begins = memory_of(rows.begins);
        kernel.group_ends = memory_of(rows.ends);
        kernel.m = arguments.u32("M", md.rows);
        kernel.n = arguments.u32("N", md.columns);
        kernel.stride_d = arguments.u32("stride of D", md.batch_stride);
        recording.dispatch(kernel, {arguments.u32("tiles", div_up(md.rows, tile_rows)),
                                    arguments.u32("tiles", div_up(md.columns, tile_columns)),
                                    arguments.u32("groups", groups)});
    };
    const Device& device = recording.device();
    if (on_native_units(device, ma, mb, md)) {
        using K = kernels::HopperGroupedGemmTn;
        const NativeGrid grid = native_grid(device, md.rows, md.columns, groups);
        K kernel = fill_native_gemm<K>(arguments, grid, K::Variant::tn_256, K::Variant::tn_64, ma,
                                       mb, md, accumulate, alpha);
        kernel.group_begins = memory_of(rows.begins);
        kernel.group_ends = memory_of(rows.ends);
        kernel.rows = arguments.u32("rows", ma.rows);
        kernel.m = arguments.u32("M", md.rows);
        kernel.n = arguments.u32("N", md.columns);
        kernel.groups = arguments.u32("groups", groups);
        kernel.stride_d = arguments.u32("stride of D", md.batch_stride);
        recording.dispatch(kernel, grid.groups);
        return;
    }
    if (on_workgroup_units(device, ma, mb, md)) {
        const std::uint32_t columns = workgroup_columns(device, md.rows, md.columns, groups);
        dispatch(fill_workgroup_gemm<kernels::GroupedGemmCoopmat2Tn>(arguments, columns, ma, mb, md,
                                                                     accumulate, alpha),
                 detail::WorkgroupTile::kRows, columns);
        return;
    }
    if (on_matrix_units(device, ma, mb)) {
        const GemmTile& tile = device.impl().gemm.grouped(GemmForm::TN);
        dispatch(fill_units_gemm<kernels::GroupedGemmCoopmatTn>(arguments, device, tile, ma, mb, md,
                                                                accumulate, alpha),
                 tile.rows(), tile.columns());
        return;
    }
    const GemmPlan plan = plan_gemm(device, md.rows);
    dispatch(fill_gemm<kernels::GroupedGemmTn>(arguments, plan, ma, mb, md, accumulate, alpha),
             plan.tile_rows(), kTileColumns);
}

void grouped_gemm_tn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const TensorView& offsets, bool accumulate, float alpha) {
    grouped_gemm_tn(recording, a, b, d, group_ranges(offsets), accumulate, alpha);
}

} // namespace bellows::ops
