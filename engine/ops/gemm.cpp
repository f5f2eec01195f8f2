// SPDX-License-Identifier: MIT
#include "gemm_launch.hpp"

#include <bellows/base/rounding.hpp>

#include <algorithm>

namespace bellows::ops {

GemmPlan plan_gemm(const Device& device, std::uint64_t rows) {
    const DeviceInfo& info = device.info();
    GemmPlan plan;
    if (!info.is_cpu) {
        plan.local_size = 64;
        plan.rows_per_tile = rows <= 64 ? 4 : 8;
        return plan;
    }
    while (plan.rows_per_tile > 8 && rows <= plan.rows_per_tile / 2)
        plan.rows_per_tile /= 2;
    plan.may_share_a = shares_loads(info);
    return plan;
}

GemmPlan plan_grouped_gemm(const Device& device) {
    const DeviceInfo& info = device.info();
    GemmPlan plan;
    plan.rows_per_tile = info.is_cpu ? 16 : 8;
    plan.local_size = group_tile_rows(info) * 8 / plan.rows_per_tile;
    plan.may_share_a = shares_loads(info);
    return plan;
}

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
    const auto by_groups_of = [&](std::uint64_t count) {
        return m.columns % count == 0 && m.ld % count == 0 && m.batch_stride % count == 0 &&
               view.buffer.offset % (count * size_of(view.dtype)) == 0;
    };
    m.aligned = by_groups_of(4);
    m.aligned8 = by_groups_of(8);
    arguments.require(m.rows * std::max(m.ld, m.columns) < (std::uint64_t{1} << 32) &&
                          m.batch_stride < (std::uint64_t{1} << 32),
                      std::string(name) + " spans 2^32 elements or more: " + describe(view));
    return m;
}

Matrix result_matrix(const Arguments& arguments, const TensorView& view) {
    const Matrix d = matrix(arguments, "d", view);
    arguments.require(!d.bf16 || ((d.rows <= 1 || d.ld % 2 == 0) &&
                                  (d.batch <= 1 || d.batch_stride % 2 == 0) &&
                                  view.buffer.offset % 4 == 0),
                      "rows of d must begin at multiples of 4 bytes: " + describe(view) +
                          ", offset " + std::to_string(view.buffer.offset));
    return d;
}

bool on_matrix_units(const Device& device, const Matrix& a, const Matrix& b) {
    return a.bf16 && b.bf16 && device.impl().gemm.gemm_class.units != GemmClass::Units::None;
}

namespace {

/// Whether all rows are whole groups of 8 elements at multiples of 16 bytes.
bool in_octets(const Matrix& a, const Matrix& b, const Matrix& d) {
    return a.aligned8 && b.aligned8 && d.aligned8 && a.rows > 0 && a.columns > 0;
}

std::uint64_t processors(const Device& device) {
    constexpr std::uint64_t kUsual = 132;
    return device.info().processors != 0 ? device.info().processors : kUsual;
}

} // namespace

bool on_native_units(const Device& device, const Matrix& a, const Matrix& b, const Matrix& d) {
    return device.impl().gemm.gemm_class.native && on_matrix_units(device, a, b) &&
           in_octets(a, b, d);
}

bool on_workgroup_units(const Device& device, const Matrix& a, const Matrix& b, const Matrix& d) {
    return device.impl().gemm.gemm_class.workgroup && on_matrix_units(device, a, b) &&
           in_octets(a, b, d);
}

std::uint32_t workgroup_columns(const Device& device, std::uint64_t rows, std::uint64_t columns,
                                std::uint64_t matrices) {
    using Tile = detail::WorkgroupTile;
    const std::uint64_t wide = div_up(rows, Tile::kRows) * div_up(columns, Tile::kWide) * matrices;
    return wide < processors(device) ? Tile::kNarrow : Tile::kWide;
}

NativeGrid native_grid(const Device& device, std::uint64_t rows, std::uint64_t columns,
                       std::uint64_t matrices) {
    constexpr std::uint64_t kRows = 128, kWide = 256, kNarrow = 64;
    // A narrow tile has a quarter of a wide one's products and half of its loads.
    constexpr std::uint64_t kWideCost = 8, kNarrowCost = 3;
    const std::uint64_t workgroups = processors(device);
    const std::uint64_t high = div_up(rows, kRows) * matrices;
    const std::uint64_t wide = high * div_up(columns, kWide);
    const std::uint64_t narrow = high * div_up(columns, kNarrow);
    const bool is_wide =
        div_up(wide, workgroups) * kWideCost <= div_up(narrow, workgroups) * kNarrowCost;
    return {is_wide ? kWide : kNarrow,
            {static_cast<std::uint32_t>(std::min(is_wide ? wide : narrow, workgroups)), 1, 1}};
}

namespace {

struct Sizes {
    std::uint64_t m = 0, n = 0, k = 0;
};

/// The first tile while there are enough of them to fill a device, else the next smaller ones.
const GemmTile& choose_tile(const std::vector<GemmTile>& tiles, const Sizes& sizes,
                            std::uint64_t batches) {
    constexpr std::uint64_t kEnough = 96;
    const auto area = [](const GemmTile& tile) { return tile.rows() * tile.columns(); };
    const GemmTile* tile = &tiles.front();
    while (div_up(sizes.m, tile->rows()) * div_up(sizes.n, tile->columns()) * batches < kEnough) {
        const GemmTile* smaller = nullptr;
        for (const GemmTile& other : tiles)
            if (area(other) < area(*tile) && (smaller == nullptr || area(other) > area(*smaller)))
                smaller = &other;
        if (smaller == nullptr)
            break;
        tile = smaller;
    }
    return *tile;
}

template <class K>
K with_sizes(const Arguments& arguments, K kernel, const Matrix& a, const Matrix& b,
             const Matrix& d, const Sizes& sizes) {
    kernel.m = arguments.u32("M", sizes.m);
    kernel.n = arguments.u32("N", sizes.n);
    kernel.k = arguments.u32("K", sizes.k);
    kernel.stride_a = arguments.u32("stride of A", a.batch_stride);
    kernel.stride_b = arguments.u32("stride of B", b.batch_stride);
    kernel.stride_d = arguments.u32("stride of D", d.batch_stride);
    return kernel;
}

template <class K>
void dispatch_dense(Recording& recording, const Arguments& arguments, const K& kernel,
                    const Matrix& a, const Matrix& b, const Matrix& d, const Sizes& sizes,
                    std::uint64_t tile_rows, std::uint64_t tile_columns) {
    recording.dispatch(with_sizes(arguments, kernel, a, b, d, sizes),
                       {arguments.u32("tiles", div_up(sizes.m, tile_rows)),
                        arguments.u32("tiles", div_up(sizes.n, tile_columns)),
                        arguments.u32("batches", d.batch)});
}

constexpr std::uint64_t kFewTurn = 64, kFewColumns = 64; // of a workgroup

/// Whether the kernel for few rows (gemm_bf16_few.cu), with the same bits, is the faster one: a
/// workgroup of it begins sooner, but reads more, so that many weights are better off in large
/// tiles.
bool few_native(GemmForm form, const Sizes& sizes, std::uint64_t batches) {
    constexpr std::uint64_t kMostRows = 256, kMostWeights = std::uint64_t{1} << 23;
    return form != GemmForm::TN && sizes.m <= kMostRows &&
           sizes.n * sizes.k * batches <= kMostWeights;
}

void dense_few_native(Recording& recording, const Arguments& arguments, GemmForm form,
                      const Matrix& a, const Matrix& b, const Matrix& d, const Sizes& sizes,
                      bool accumulate, float alpha) {
    using K = kernels::HopperFewGemm;
    K kernel = with_sizes(arguments, fill_operands<K>(arguments, a, b, d, accumulate, alpha), a, b,
                          d, sizes);
    kernel.variant = form == GemmForm::NT ? K::Variant::nt : K::Variant::nn;
    kernel.f32 = d.bf16 ? 0 : 1;
    recording.dispatch(kernel, {arguments.u32("rows", div_up(sizes.m, kFewTurn)),
                                arguments.u32("columns", div_up(sizes.n, kFewColumns)),
                                arguments.u32("batches", d.batch)});
}

void dense_native(Recording& recording, const Arguments& arguments, GemmForm form, const Matrix& a,
                  const Matrix& b, const Matrix& d, const Sizes& sizes, bool accumulate,
                  float alpha) {
    if (few_native(form, sizes, d.batch)) {
        dense_few_native(recording, arguments, form, a, b, d, sizes, accumulate, alpha);
        return;
    }
    using K = kernels::HopperGemm;
    using Variant = K::Variant;
    constexpr Variant kWide[] = {Variant::nt_256, Variant::nn_256, Variant::tn_256};
    constexpr Variant kNarrow[] = {Variant::nt_64, Variant::nn_64, Variant::tn_64};
    const auto index = static_cast<std::size_t>(form);
    const NativeGrid grid = native_grid(recording.device(), sizes.m, sizes.n, d.batch);
    K kernel = with_sizes(arguments,
                          fill_native_gemm<K>(arguments, grid, kWide[index], kNarrow[index], a, b,
                                              d, accumulate, alpha),
                          a, b, d, sizes);
    kernel.batches = arguments.u32("batches", d.batch);
    recording.dispatch(kernel, grid.groups);
}

template <class K>
void dense_by_workgroups(Recording& recording, const Arguments& arguments, const Matrix& a,
                         const Matrix& b, const Matrix& d, const Sizes& sizes, bool accumulate,
                         float alpha) {
    using Tile = detail::WorkgroupTile;
    const std::uint32_t columns = workgroup_columns(recording.device(), sizes.m, sizes.n, d.batch);
    auto kernel = fill_workgroup_gemm<K>(arguments, columns, a, b, d, accumulate, alpha);
    kernel.constants.edges =
        sizes.m % Tile::kRows != 0 || sizes.n % columns != 0 || sizes.k % Tile::kDepth != 0;
    dispatch_dense(recording, arguments, kernel, a, b, d, sizes, Tile::kRows, columns);
}

template <class Scalar, class Units, class Workgroup>
void dense(Recording& recording, const Arguments& arguments, GemmForm form, const Matrix& a,
           const Matrix& b, const Matrix& d, const Sizes& sizes, bool accumulate, float alpha) {
    arguments.require(d.rows == sizes.m && d.columns == sizes.n && a.batch == b.batch &&
                          a.batch == d.batch,
                      "the shapes do not fit: M = " + std::to_string(sizes.m) +
                          ", N = " + std::to_string(sizes.n) + ", K = " + std::to_string(sizes.k) +
                          ", D is " + std::to_string(d.rows) + " x " + std::to_string(d.columns) +
                          ", batches " + std::to_string(a.batch) + ", " + std::to_string(b.batch) +
                          ", " + std::to_string(d.batch));
    if (sizes.m == 0 || sizes.n == 0 || d.batch == 0)
        return;
    const Device& device = recording.device();
    if (on_native_units(device, a, b, d)) {
        dense_native(recording, arguments, form, a, b, d, sizes, accumulate, alpha);
        return;
    }
    if (on_workgroup_units(device, a, b, d)) {
        dense_by_workgroups<Workgroup>(recording, arguments, a, b, d, sizes, accumulate, alpha);
        return;
    }
    if (on_matrix_units(device, a, b)) {
        const GemmTile& tile = choose_tile(device.impl().gemm.of(form), sizes, d.batch);
        auto kernel = fill_units_gemm<Units>(arguments, device, tile, a, b, d, accumulate, alpha);
        kernel.constants.band = tile.band;
        dispatch_dense(recording, arguments, kernel, a, b, d, sizes, tile.rows(), tile.columns());
        return;
    }
    const GemmPlan plan = plan_gemm(device, sizes.m);
    const auto kernel = fill_gemm<Scalar>(arguments, plan, a, b, d, accumulate, alpha);
    dispatch_dense(recording, arguments, kernel, a, b, d, sizes, plan.tile_rows(), kTileColumns);
}

/// Of each matrix of a batch, which are addressed in 64 bits.
void require_reach(const Arguments& arguments, std::initializer_list<TensorView> matrices) {
    for (const TensorView& view : matrices) {
        const std::uint64_t rows = view.extent[view.rank - 2], ld = view.stride[view.rank - 2];
        arguments.require(rows * ld * size_of(view.dtype) <= kKernelReach,
                          "a matrix is " + describe(view) +
                              ", too large for one kernel, which reaches 4 GiB of it");
    }
}

} // namespace

void gemm_nt(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_nt");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = result_matrix(arguments, d);
    require_reach(arguments, {a, b, d});
    arguments.require(ma.columns == mb.columns,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmNt, kernels::GemmCoopmatNt, kernels::GemmCoopmat2Nt>(
        recording, arguments, GemmForm::NT, ma, mb, md, {ma.rows, mb.rows, ma.columns}, accumulate,
        alpha);
}

void gemm_nn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_nn");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = result_matrix(arguments, d);
    require_reach(arguments, {a, b, d});
    arguments.require(ma.columns == mb.rows,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmNn, kernels::GemmCoopmatNn, kernels::GemmCoopmat2Nn>(
        recording, arguments, GemmForm::NN, ma, mb, md, {ma.rows, mb.columns, ma.columns},
        accumulate, alpha);
}

void gemm_tn(Recording& recording, const TensorView& a, const TensorView& b, const TensorView& d,
             bool accumulate, float alpha) {
    const Arguments arguments("gemm_tn");
    const Matrix ma = matrix(arguments, "a", a), mb = matrix(arguments, "b", b),
                 md = result_matrix(arguments, d);
    require_reach(arguments, {a, b, d});
    arguments.require(ma.rows == mb.rows,
                      "K differs: a is " + describe(a) + ", b is " + describe(b));
    dense<kernels::GemmTn, kernels::GemmCoopmatTn, kernels::GemmCoopmat2Tn>(
        recording, arguments, GemmForm::TN, ma, mb, md, {ma.columns, mb.columns, ma.rows},
        accumulate, alpha);
}

void gemm_tn_tall(Recording& recording, const TensorView& a, const TensorView& b,
                  const TensorView& d, bool accumulate, BufferView workspace) {
    const Arguments arguments("gemm_tn_tall");
    arguments.rank("a", a, 2);
    arguments.rank("b", b, 2);
    const std::uint64_t k = a.extent[0], m = a.extent[1], n = b.extent[1];
    arguments.tensor("d", d, DType::F32, {m, n});
    arguments.multiple_of_4("N", n);
    arguments.require(b.extent[0] == k, "K differs: a is " + describe(a) + ", b is " + describe(b));
    const std::uint64_t bytes = gemm_tn_tall_workspace_bytes(k, m, n);
    if (bytes == 0) {
        gemm_tn(recording, a, b, d, accumulate);
        return;
    }
    arguments.workspace(workspace, bytes);
    const std::uint64_t rows = gemm_tn_tall_rows(k, m, n), runs = div_up(k, rows), whole = k / rows;
    const TensorView sums =
        TensorView::contiguous(workspace.sub(0, bytes), DType::F32, {runs, m, n});
    const auto in_runs = [&](TensorView x) {
        x.rank = 3;
        x.extent = {whole, rows, x.extent[1]};
        x.stride = {rows * x.stride[0], x.stride[0], x.stride[1]};
        return x;
    };
    gemm_tn(recording, in_runs(a), in_runs(b), sums.rows(0, whole));
    if (const std::uint64_t first = whole * rows; first < k)
        gemm_tn(recording, a.rows(first, k - first), b.rows(first, k - first),
                sums.rows(whole, 1).reshaped({m, n}));
    add_rows(recording, arguments, sums.buffer, runs, m * n, arguments.memory("d", d), accumulate);
}

} // namespace bellows::ops
