// SPDX-License-Identifier: MIT
#pragma once

// What dense and grouped products share: operands as the kernels want them, and the filling of the
// two kinds of kernels, those of f32 arithmetic (GemmPlan) and those on matrix units (GemmTile).

#include "arguments.hpp"
#include "runtime/device_impl.hpp"
#include "runtime/matrices/cooperative_matrices.hpp"

#include <bellows/base/rounding.hpp>
#include <bellows/engine/gemm.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::ops {

inline constexpr std::uint64_t kTileColumns = 32;

/// How the tiles of a product are cut on this device (shaders/gemm_nt.comp).
struct GemmPlan {
    std::uint32_t local_size = 8;
    std::uint32_t rows_per_tile = 32;
    bool may_share_a = false;

    std::uint32_t tile_rows() const { return rows_per_tile * local_size / 8; }
};

GemmPlan plan_gemm(const Device& device, std::uint64_t rows);
/// Tiles are group_tile_rows high.
GemmPlan plan_grouped_gemm(const Device& device);

/// One matrix operand as the kernels want it.
struct Matrix {
    std::uint64_t batch = 1, rows = 0, columns = 0, ld = 0, batch_stride = 0;
    BufferView memory;
    bool bf16 = false;
    bool aligned = false;  ///< rows by groups of four elements
    bool aligned8 = false; ///< rows by groups of eight
};

Matrix matrix(const Arguments& arguments, const char* name, const TensorView& view);
/// The same for D, whose bf16 rows are written by words.
Matrix result_matrix(const Arguments& arguments, const TensorView& view);

/// Whether matrix units compute the product.
bool on_matrix_units(const Device& device, const Matrix& a, const Matrix& b);

/// Whether the device's own code computes a product on matrix units: its copies take rows of whole
/// groups of 8 elements.
bool on_native_units(const Device& device, const Matrix& a, const Matrix& b, const Matrix& d);

/// The same of matrices of whole workgroups.
bool on_workgroup_units(const Device& device, const Matrix& a, const Matrix& b, const Matrix& d);

/// Columns of the tiles of such a product, of `matrices` of D: narrow ones where wide ones would
/// leave processors without.
std::uint32_t workgroup_columns(const Device& device, std::uint64_t rows, std::uint64_t columns,
                                std::uint64_t matrices);

/// Columns of the tiles of a product on native units, 256 or 64, and its workgroups.
struct NativeGrid {
    std::uint64_t width = 0;
    Groups groups;
};
/// matrices: of D. rows: of each, the most where the device knows them.
NativeGrid native_grid(const Device& device, std::uint64_t rows, std::uint64_t columns,
                       std::uint64_t matrices);

template <class K>
K fill_operands(const Arguments& arguments, const Matrix& a, const Matrix& b, const Matrix& d,
                bool accumulate, float alpha) {
    K kernel;
    kernel.a = a.memory;
    kernel.b = b.memory;
    kernel.d = d.memory;
    kernel.lda = arguments.u32("lda", a.ld);
    kernel.ldb = arguments.u32("ldb", b.ld);
    kernel.ldd = arguments.u32("ldd", d.ld);
    kernel.accumulate = accumulate ? 1 : 0;
    kernel.alpha = alpha;
    return kernel;
}

/// A kernel of shaders/native; wide, narrow: its variants.
template <class K>
K fill_native_gemm(const Arguments& arguments, const NativeGrid& grid, typename K::Variant wide,
                   typename K::Variant narrow, const Matrix& a, const Matrix& b, const Matrix& d,
                   bool accumulate, float alpha) {
    K kernel = fill_operands<K>(arguments, a, b, d, accumulate, alpha);
    kernel.variant = grid.width == 256 ? wide : narrow;
    kernel.f32 = d.bf16 ? 0 : 1;
    return kernel;
}

template <class K>
K fill_gemm(const Arguments& arguments, const GemmPlan& plan, const Matrix& a, const Matrix& b,
            const Matrix& d, bool accumulate, float alpha) {
    K kernel = fill_operands<K>(arguments, a, b, d, accumulate, alpha);
    const bool aligned = a.aligned && b.aligned && d.aligned;
    kernel.variant =
        static_cast<typename K::Variant>((a.bf16 ? 4 : 0) + (b.bf16 ? 2 : 0) + (d.bf16 ? 1 : 0));
    kernel.constants.local_size = plan.local_size;
    kernel.constants.aligned = aligned ? 1 : 0;
    kernel.constants.rows_per_tile = plan.rows_per_tile;
    kernel.constants.share_a =
        plan.may_share_a && aligned && plan.local_size == 8 && plan.rows_per_tile % 8 == 0;
    return kernel;
}

template <class K>
K fill_units_gemm(const Arguments& arguments, const Device& device, const GemmTile& tile,
                  const Matrix& a, const Matrix& b, const Matrix& d, bool accumulate, float alpha) {
    using Variant = typename K::Variant;
    K kernel = fill_operands<K>(arguments, a, b, d, accumulate, alpha);
    if (device.impl().gemm.gemm_class.units == GemmClass::Units::BF16)
        kernel.variant = d.bf16 ? Variant::bf16_bf16 : Variant::bf16_f32;
    else
        kernel.variant = d.bf16 ? Variant::f16_bf16 : Variant::f16_f32;
    detail::set_tile(kernel.constants, tile, device.info());
    kernel.constants.aligned = a.aligned8 && b.aligned8 && d.aligned ? 1 : 0;
    return kernel;
}

/// A kernel of shaders/gemm_coopmat2_*.comp or its grouped ones.
template <class K>
K fill_workgroup_gemm(const Arguments& arguments, std::uint32_t columns, const Matrix& a,
                      const Matrix& b, const Matrix& d, bool accumulate, float alpha) {
    using Tile = detail::WorkgroupTile;
    K kernel = fill_operands<K>(arguments, a, b, d, accumulate, alpha);
    kernel.variant = d.bf16 ? K::Variant::bf16 : K::Variant::f32;
    kernel.constants.local_size = Tile::kInvocations;
    kernel.constants.block_m = Tile::kRows;
    kernel.constants.block_n = columns;
    kernel.constants.block_k = Tile::kDepth;
    kernel.constants.adds = accumulate ? 1 : 0;
    return kernel;
}

/// A work list in `memory`, to be written by a kernel that fill_group_tiles has prepared.
GroupTiles plan_group_tiles(const Arguments& arguments, const Device& device,
                            const GroupRanges& rows, std::uint64_t max_rows,
                            const std::array<std::uint64_t, GroupTiles::kMaxShapes>& columns,
                            BufferView memory);

/// For kernels of shaders/include/group_tiles.glsl.
template <class K>
void fill_group_tiles(K& kernel, const GroupTiles& list) {
    const auto grid = [&](std::size_t i) {
        return static_cast<std::uint32_t>(div_up(list.columns[i], kTileColumns));
    };
    kernel.tiles = list.tiles;
    kernel.arguments = list.arguments;
    kernel.tile_rows = list.tile_rows;
    kernel.wide = list.width_on_units;
    kernel.columns0 = grid(0);
    kernel.columns1 = grid(1);
    kernel.columns2 = grid(2);
    kernel.columns3 = grid(3);
}

} // namespace bellows::ops
