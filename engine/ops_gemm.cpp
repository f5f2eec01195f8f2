// SPDX-License-Identifier: MIT
#include "ops_check.hpp"

#include <bellows/engine/gemm.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <cstdlib>

namespace bellows::ops {

namespace {

constexpr std::uint64_t kTileColumns = 32;
constexpr std::uint64_t kArgumentBytes = GroupTiles::kMaxShapes * 12;

/// How the tiles of a product are cut on this device (shaders/gemm_nt.comp).
struct GemmPlan {
    std::uint32_t local_size = 8;
    std::uint32_t rows_per_tile = 32;
    bool may_share_a = false;

    std::uint32_t tile_rows() const { return rows_per_tile * local_size / 8; }
};

/// Mesa's major version of a llvmpipe device, 0 elsewhere.
int mesa_major(const DeviceInfo& info) {
    const std::size_t at = info.driver.find("Mesa ");
    return info.is_cpu && at != std::string::npos ? std::atoi(info.driver.c_str() + at + 5) : 0;
}

GemmPlan plan_gemm(const Device& device, std::uint64_t rows, bool grouped) {
    const DeviceInfo& info = device.info();
    GemmPlan plan;
    if (!info.is_cpu) {
        plan.local_size = 64;
        plan.rows_per_tile = rows <= 64 && !grouped ? 4 : 8;
        return plan;
    }
    plan.rows_per_tile = grouped ? 16 : 32;
    while (!grouped && plan.rows_per_tile > 8 && rows <= plan.rows_per_tile / 2)
        plan.rows_per_tile /= 2;
    const int mesa = mesa_major(info);
    plan.may_share_a = mesa > 0 && mesa < 26 && info.subgroup_size == 8;
    return plan;
}

/// One matrix operand as the kernels want it.
struct Matrix {
    std::uint64_t batch = 1, rows = 0, columns = 0, ld = 0, batch_stride = 0;
    BufferView memory;
    bool bf16 = false;
    bool aligned = false;
};

Matrix matrix(const Arguments& arguments, const char* name, const TensorView& view) {
    arguments.activation(name, view);
    arguments.require(view.rank == 2 || view.rank == 3,
                      std::string(name) + " must have 2 or 3 dimensions, it is " + describe(view));
    const std::uint32_t r = view.rank - 2;
    arguments.require(view.stride[r + 1] == 1 || view.extent[r + 1] <= 1,
                      std::string("the last stride of ") + name + " must be 1: " + describe(view));
    Matrix m;
    m.batch = view.rank == 3 ? view.extent[0] : 1;
    m.batch_stride = view.rank == 3 ? view.stride[0] : 0;
    m.rows = view.extent[r];
    m.columns = view.extent[r + 1];
    m.ld = view.stride[r];
    m.bf16 = view.dtype == DType::BF16;
    m.memory = view.buffer;
    const std::uint64_t four = 4 * size_of(view.dtype);
    m.aligned = m.columns % 4 == 0 && m.ld % 4 == 0 && m.batch_stride % 4 == 0 &&
                view.buffer.offset % four == 0;
    arguments.require(m.rows * std::max(m.ld, m.columns) < (std::uint64_t{1} << 32) &&
                          m.batch_stride < (std::uint64_t{1} << 32),
                      std::string(name) + " spans 2^32 elements or more: " + describe(view));
    return m;
}

template <class K>
typename K::Variant gemm_variant(const Matrix& a, const Matrix& b, const Matrix& d) {
    return static_cast<typename K::Variant>((a.bf16 ? 4 : 0) + (b.bf16 ? 2 : 0) + (d.bf16 ? 1 : 0));
}

struct Sizes {
    std::uint64_t m = 0, n = 0, k = 0;
};

template <class K>
K fill_gemm(const Arguments& arguments, const GemmPlan& plan, const Matrix& a, const Matrix& b,
            const Matrix& d, bool accumulate, float alpha) {
    const bool aligned = a.aligned && b.aligned && d.aligned;
    K kernel;
    kernel.variant = gemm_variant<K>(a, b, d);
    kernel.constants.local_size = plan.local_size;
    kernel.constants.aligned = aligned ? 1 : 0;
    kernel.constants.rows_per_tile = plan.rows_per_tile;
    kernel.constants.share_a =
        plan.may_share_a && aligned && plan.local_size == 8 && plan.rows_per_tile % 8 == 0;
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

template <class K>
void dense(Recording& recording, const Arguments& arguments, const Matrix& a, const Matrix& b,
           const Matrix& d, const Sizes& sizes, bool accumulate, float alpha) {
    arguments.require(d.rows == sizes.m && d.columns == sizes.n && a.batch == b.batch &&
                          a.batch == d.batch,
                      "the shapes do not fit: M = " + std::to_string(sizes.m) +
                          ", N = " + std::to_string(sizes.n) + ", K = " + std::to_string(sizes.k) +
                          ", D is " + std::to_string(d.rows) + " x " + std::to_string(d.columns) +
                          ", batches " + std::to_string(a.batch) + ", " + std::to_string(b.batch) +
                          ", " + std::to_string(d.batch));
    if (sizes.m == 0 || sizes.n == 0 || d.batch == 0)
        return;
    const GemmPlan plan = plan_gemm(recording.device(), sizes.m, false);
    K kernel = fill_gemm<K>(arguments, plan, a, b, d, accumulate, alpha);
    kernel.m = arguments.u32("M", sizes.m);
    kernel.n = arguments.u32("N", sizes.n);
    kernel.k = arguments.u32("K", sizes.k);
    kernel.stride_a = arguments.u32("stride of A", a.batch_stride);
    kernel.stride_b = arguments.u32("stride of B", b.batch_stride);
    kernel.stride_d = arguments.u32("stride of D", d.batch_stride);
    recording.dispatch(kernel, {arguments.u32("tiles", div_up(sizes.m, plan.tile_rows())),
                                arguments.u32("tiles", div_up(sizes.n, kTileColumns)),
                                arguments.u32("batches", d.batch)});
}

} // namespace

void gemm_nt(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_nt");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = matrix(arguments, "d", d);
    arguments.require(ma.columns == mb.columns,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmNt>(recording, arguments, ma, mb, md, {ma.rows, mb.rows, ma.columns},
                           accumulate, alpha);
}

void gemm_nn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_nn");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = matrix(arguments, "d", d);
    arguments.require(ma.columns == mb.rows,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmNn>(recording, arguments, ma, mb, md, {ma.rows, mb.columns, ma.columns},
                           accumulate, alpha);
}

void gemm_tn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_tn");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = matrix(arguments, "d", d);
    arguments.require(ma.rows == mb.rows,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmTn>(recording, arguments, ma, mb, md, {ma.columns, mb.columns, ma.rows},
                           accumulate, alpha);
}

// ---- Grouped --------------------------------------------------------------------------------

namespace {

std::uint64_t tiles_capacity(std::uint64_t max_rows, std::uint64_t groups,
                             std::uint32_t tile_rows) {
    return max_rows / tile_rows + groups;
}

std::uint64_t check_offsets(const Arguments& arguments, const TensorView& offsets) {
    arguments.rank("offsets", offsets, 1);
    arguments.require(offsets.extent[0] >= 2, "offsets need at least two entries");
    arguments.tensor("offsets", offsets, DType::U32, {offsets.extent[0]});
    return offsets.extent[0] - 1;
}

template <class K>
void grouped_rows(Recording& recording, const Arguments& arguments, const TensorView& a,
                  const TensorView& b, const TensorView& d, bool transposed_b,
                  const GroupTiles& tiles, bool accumulate, float alpha) {
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = matrix(arguments, "d", d);
    const std::uint64_t groups = tiles.offsets.extent[0] - 1;
    const std::uint64_t n = transposed_b ? mb.rows : mb.columns;
    const std::uint64_t k = transposed_b ? mb.columns : mb.rows;
    arguments.require(a.rank == 2 && d.rank == 2 && b.rank == 3 && mb.batch == groups &&
                          ma.columns == k && md.columns == n && ma.rows == md.rows,
                      "the shapes do not fit " + std::to_string(groups) + " groups: a " +
                          describe(a) + ", b " + describe(b) + ", d " + describe(d));
    const auto shape = std::find(tiles.columns.begin(), tiles.columns.end(), n);
    arguments.require(shape != tiles.columns.end(),
                      "the work list was not made for N = " + std::to_string(n));
    const GemmPlan plan = plan_gemm(recording.device(), ma.rows, true);
    arguments.require(plan.tile_rows() == tiles.tile_rows,
                      "the work list was made for another device");
    K kernel = fill_gemm<K>(arguments, plan, ma, mb, md, accumulate, alpha);
    kernel.group_offsets = tiles.offsets.buffer;
    kernel.tiles = tiles.tiles;
    kernel.n = arguments.u32("N", n);
    kernel.k = arguments.u32("K", k);
    kernel.stride_b = arguments.u32("stride of B", mb.batch_stride);
    const auto index = static_cast<std::uint64_t>(shape - tiles.columns.begin());
    recording.dispatch_indirect(kernel, tiles.arguments.sub(index * 12, 12));
}

} // namespace

std::uint64_t group_tiles_bytes(const Device& device, std::uint64_t max_rows,
                                std::uint64_t groups) {
    const GemmPlan plan = plan_gemm(device, max_rows, true);
    return kArgumentBytes + tiles_capacity(max_rows, groups, plan.tile_rows()) * 8;
}

GroupTiles make_group_tiles(Recording& recording, const TensorView& offsets, std::uint64_t max_rows,
                            std::array<std::uint64_t, GroupTiles::kMaxShapes> columns,
                            BufferView memory) {
    const Arguments arguments("make_group_tiles");
    const std::uint64_t groups = check_offsets(arguments, offsets);
    arguments.workspace(memory, group_tiles_bytes(recording.device(), max_rows, groups));
    const GemmPlan plan = plan_gemm(recording.device(), max_rows, true);
    GroupTiles tiles;
    tiles.offsets = offsets;
    tiles.arguments = memory.sub(0, kArgumentBytes);
    tiles.tiles =
        memory.sub(kArgumentBytes, tiles_capacity(max_rows, groups, plan.tile_rows()) * 8);
    tiles.tile_rows = plan.tile_rows();
    tiles.columns = columns;
    const auto grid = [&](std::size_t i) {
        return arguments.u32("N", div_up(columns[i], kTileColumns));
    };
    kernels::GroupedGemmTiles kernel;
    kernel.group_offsets = offsets.buffer;
    kernel.tiles = tiles.tiles;
    kernel.arguments = tiles.arguments;
    kernel.groups = arguments.u32("groups", groups);
    kernel.tile_rows = tiles.tile_rows;
    kernel.columns0 = grid(0);
    kernel.columns1 = grid(1);
    kernel.columns2 = grid(2);
    kernel.columns3 = grid(3);
    recording.dispatch(kernel, {arguments.u32("groups", div_up(groups, 64))});
    return tiles;
}

void grouped_gemm_nt(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate, float alpha) {
    grouped_rows<kernels::GroupedGemmNt>(recording, Arguments("grouped_gemm_nt"), a, b, d, true,
                                         tiles, accumulate, alpha);
}

void grouped_gemm_nn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const GroupTiles& tiles, bool accumulate, float alpha) {
    grouped_rows<kernels::GroupedGemmNn>(recording, Arguments("grouped_gemm_nn"), a, b, d, false,
                                         tiles, accumulate, alpha);
}

void grouped_gemm_tn(Recording& recording, const TensorView& a, const TensorView& b,
                     const TensorView& d, const TensorView& offsets, bool accumulate, float alpha) {
    const Arguments arguments("grouped_gemm_tn");
    const std::uint64_t groups = check_offsets(arguments, offsets);
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = matrix(arguments, "d", d);
    arguments.require(a.rank == 2 && b.rank == 2 && d.rank == 3 && md.batch == groups &&
                          ma.rows == mb.rows && md.rows == ma.columns && md.columns == mb.columns,
                      "the shapes do not fit " + std::to_string(groups) + " groups: a " +
                          describe(a) + ", b " + describe(b) + ", d " + describe(d));
    if (md.rows == 0 || md.columns == 0)
        return;
    const GemmPlan plan = plan_gemm(recording.device(), md.rows, false);
    auto kernel = fill_gemm<kernels::GroupedGemmTn>(arguments, plan, ma, mb, md, accumulate, alpha);
    kernel.group_offsets = offsets.buffer;
    kernel.m = arguments.u32("M", md.rows);
    kernel.n = arguments.u32("N", md.columns);
    kernel.stride_d = arguments.u32("stride of D", md.batch_stride);
    recording.dispatch(kernel, {arguments.u32("tiles", div_up(md.rows, plan.tile_rows())),
                                arguments.u32("tiles", div_up(md.columns, kTileColumns)),
                                arguments.u32("groups", groups)});
}

} // namespace bellows::ops
