// SPDX-License-Identifier: MIT
#include "direct.hpp"

#include "operands.hpp"
#include "slots.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <limits>
#include <optional>

namespace bellows::fp8 {

namespace {

using K = kernels::GemmDirectNt;
using Units = GemmClass::Units;

constexpr std::uint32_t kUnit = 8;         // elements that an invocation reads at a time
constexpr std::uint64_t kGridColumns = 32; // of a step of a work list's grid

struct Cut {
    MatrixShape shape;
    MatrixSlots slots;
    DirectTile tile;

    std::uint32_t rows() const { return shape.m * tile.fragments_m * tile.warps_m; }
    std::uint32_t columns() const { return shape.n * tile.fragments_n * tile.warps_n; }
    std::uint32_t warps() const { return tile.warps_m * tile.warps_n; }
    /// Units of a row in a segment, in a stage.
    std::uint32_t chunks() const { return shape.k / slots.per_k; }
    std::uint32_t row_units() const { return tile.depth * chunks(); }
    std::uint32_t stage_units() const { return columns() * row_units(); }
};

/// What the shader declares.
std::uint64_t shared_bytes(const Cut& c) {
    return std::uint64_t{16} * c.tile.ring * c.stage_units();
}

/// Matrices of a row that pass to D together: as many as go, 0: none.
std::uint32_t together(const DeviceInfo& info, const Cut& c) {
    for (const std::uint32_t count : {4u, 2u, 1u}) {
        const std::uint32_t quads = count * c.shape.n / 4;
        const std::uint64_t parts = std::uint64_t{16} * c.warps() * c.shape.m * (quads + 1);
        if (c.tile.fragments_n % count == 0 && info.subgroup_size % quads == 0 &&
            c.shape.m * quads % info.subgroup_size == 0 && parts <= shared_bytes(c))
            return count;
    }
    return 0;
}

/// Whether the kernel's head comment is kept.
bool fits(const DeviceInfo& info, const Cut& c) {
    const DirectTile& tile = c.tile;
    const std::uint64_t local_size = std::uint64_t{info.subgroup_size} * c.warps();
    return (tile.depth == 1 || tile.depth == 2) && (tile.ahead == 1 || tile.ahead == 2) &&
           (tile.ring == 2 || tile.ring == 3) && tile.band != 0 && c.rows() != 0 &&
           c.columns() >= kGridColumns && local_size <= info.max_workgroup_invocations &&
           kUnit % c.slots.per_k == 0 && local_size % (2 * c.row_units()) == 0 &&
           c.stage_units() % local_size == 0 && shared_bytes(c) <= info.shared_memory_bytes &&
           together(info, c) != 0;
}

/// A tile in elements: what each subgroup computes, how many there are.
struct Plan {
    std::uint32_t warp_rows, warp_columns, warps_m, warps_n, depth, ahead, ring;
};

// The first that fits is used. Not measured yet: bench_grouped_gemm --variant direct --tiles. Sums
// of 64 x 64 or 32 x 128 and what is read ahead leave few of 255 registers: eight subgroups have a
// processor for themselves, of four two fit, and one stores while the other multiplies. 256 x 128
// takes three quarters of the reads from the device's cache that 128 x 128 takes.
constexpr Plan kPlans[] = {
    {64, 64, 4, 2, 1, 1, 3},  // 256 x 128 by 8 subgroups, 24 KiB
    {64, 64, 4, 2, 1, 2, 3},  // the same, loads of A two segments ahead
    {64, 64, 4, 2, 2, 2, 3},  // the same, half the barriers, 48 KiB
    {64, 64, 2, 4, 1, 1, 3},  // 128 x 256 by 8, 48 KiB
    {32, 128, 8, 1, 1, 1, 3}, // 256 x 128 by 8, 24 KiB: A is read once, B by each subgroup
    {32, 128, 8, 1, 1, 2, 3}, // the same, loads of A two segments ahead
    {64, 64, 2, 2, 1, 1, 3},  // 128 x 128 by 4, 24 KiB
    {64, 64, 2, 2, 1, 1, 2},  // the same, 16 KiB
    {32, 128, 4, 1, 1, 2, 2}, // 128 x 128 by 4, 16 KiB
};

std::optional<Cut> cut_of(const DeviceInfo& info, const GemmClass& c, const MatrixSlots& slots,
                          const Plan& plan) {
    if (plan.warp_rows % c.shape.m != 0 || plan.warp_columns % c.shape.n != 0)
        return std::nullopt;
    const Cut cut{c.shape,
                  slots,
                  {.fragments_m = plan.warp_rows / c.shape.m,
                   .fragments_n = plan.warp_columns / c.shape.n,
                   .warps_m = plan.warps_m,
                   .warps_n = plan.warps_n,
                   .depth = plan.depth,
                   .ahead = plan.ahead,
                   .ring = plan.ring}};
    return fits(info, cut) ? std::optional(cut) : std::nullopt;
}

/// All that the device can run; the first is used.
std::vector<Cut> cuts(const Device& device) {
    const GemmClass& c = gemm_class(device);
    const DeviceInfo& info = device.info();
    std::vector<Cut> result;
    const auto slots =
        c.units == Units::None ? std::nullopt : matrix_slots(device, c.shape, c.units);
    if (!slots)
        return result;
    if (const auto& forced = forced_direct_tile(device)) {
        const Cut cut{c.shape, *slots, *forced};
        if (fits(info, cut))
            result.push_back(cut);
        return result;
    }
    if (!info.is_cpu) // whose matrices are slower than its f32 arithmetic
        for (const Plan& plan : kPlans)
            if (const auto cut = cut_of(info, c, *slots, plan))
                result.push_back(*cut);
    return result;
}

K::Variant variant_for(const Device& device, DType d) {
    const bool bf16 = d == DType::BF16;
    if (gemm_class(device).units == Units::BF16)
        return bf16 ? K::Variant::bf16_bf16 : K::Variant::bf16_f32;
    return bf16 ? K::Variant::f16_bf16 : K::Variant::f16_f32;
}

/// Of A or B: what stands against reading it unit by unit.
std::string why_not_units(const char* name, const TensorView& view) {
    const std::uint64_t ld = view.stride[view.rank - 2],
                        batch = view.rank == 3 ? view.stride[0] : 0;
    if (view.stride[view.rank - 1] != 1 || view.extent[view.rank - 1] % kUnit != 0 ||
        ld % kUnit != 0 || batch % kUnit != 0 || view.buffer.offset % 16 != 0)
        return std::string(name) + " is " + describe(view) +
               "; it takes rows that begin at multiples of 16 bytes and have multiples of 8 "
               "elements";
    if (view.extent[view.rank - 2] * ld / kUnit > std::numeric_limits<std::uint32_t>::max() ||
        batch / kUnit > std::numeric_limits<std::uint32_t>::max())
        return std::string(name) + " is " + describe(view) + ", more than 2^35 elements";
    return "";
}

void set_cut(K::Constants& c, const DeviceInfo& info, const Cut& cut) {
    c.local_size = info.subgroup_size * cut.warps();
    c.mma_m = cut.shape.m;
    c.mma_n = cut.shape.n;
    c.mma_k = cut.shape.k;
    c.fragments_m = cut.tile.fragments_m;
    c.fragments_n = cut.tile.fragments_n;
    c.warps_m = cut.tile.warps_m;
    c.warps_n = cut.tile.warps_n;
    c.depth = cut.tile.depth;
    c.ahead = cut.tile.ahead;
    c.ring = cut.tile.ring;
    c.together = together(info, cut);
    c.per_k = cut.slots.per_k;
    c.a_place = cut.slots.a.place;
    c.a_slot = cut.slots.a.slot;
    c.a_lane = cut.slots.a.lane;
    c.a_chunk = cut.slots.a.chunk;
    c.b_place = cut.slots.b.place;
    c.b_slot = cut.slots.b.slot;
    c.b_lane = cut.slots.b.lane;
    c.b_chunk = cut.slots.b.chunk;
    c.flip = (cut.slots.b.slot & 0x11111111u) == 0 ? 1 : 0;
    c.band = cut.tile.band;
}

} // namespace

std::vector<DirectTile> direct_tiles(const Device& device) {
    std::vector<DirectTile> tiles;
    for (const Cut& cut : cuts(device))
        tiles.push_back(cut.tile);
    return tiles;
}

std::string why_not_direct(const Device& device) {
    if (gemm_class(device).units == Units::None)
        return "the products of bf16 tensors use no matrix units here";
    const std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(variant_for(device, DType::F32)));
    if (!lacking.empty())
        return lacking;
    if (cuts(device).empty())
        return device.info().is_cpu && !forced_direct_tile(device)
                   ? "a CPU's matrices are slower than its f32 arithmetic"
                   : "no tile fits the device's matrices and its workgroup memory";
    return "";
}

std::string why_not_direct(const Device& device, const Product& p) {
    if (p.form != GemmForm::NT)
        return "it takes weights whose k runs along columns (nt)";
    if (p.a.quantized || p.b.quantized || p.a.values.dtype != DType::BF16 ||
        p.b.values.dtype != DType::BF16)
        return "it takes bf16 operands";
    if (by_slots(p))
        return "it takes rows in the order of groups";
    if (extents_of(p.a.values).rows == 0 || extents_of(p.a.values).columns == 0)
        return "it needs operands that are not empty";
    for (const auto& [name, view] : {std::pair{"a", &p.a.values}, {"b", &p.b.values}})
        if (std::string lacking = why_not_units(name, *view); !lacking.empty())
            return lacking;
    if (std::string lacking = why_not_direct(device); !lacking.empty())
        return lacking;
    if (p.rows == nullptr)
        return "";
    const std::uint32_t tile_rows =
        p.rows->listed() ? p.rows->tiles.tile_rows : group_tile_rows(device.info());
    if (cuts(device).front().rows() % tile_rows != 0)
        return "the device's work lists have tiles of " + std::to_string(tile_rows) + " rows";
    return "";
}

std::string direct_class(const Device& device) {
    const GemmClass& c = gemm_class(device);
    return c.units == Units::None
               ? c.name
               : std::string(c.units == Units::BF16 ? "direct-bf16-k" : "direct-f16-k") +
                     std::to_string(c.shape.k);
}

void record_direct(Recording& recording, const char* op, const Product& p) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    const Device& device = recording.device();
    const Cut cut = cuts(device).front();
    const auto units = [&](const char* what, const TensorView& view, std::uint32_t dimension) {
        return operands.u32(what, view.stride[dimension] / kUnit);
    };
    const TensorView &a = p.a.values, &b = p.b.values;
    const Destination to = operands.destination(p.d);
    K kernel{.variant = variant_for(device, p.d.dtype),
             .tiles = a.buffer,
             .begins = a.buffer,
             .ends = a.buffer,
             .a = a.buffer,
             .b = b.buffer,
             .d = p.d.buffer,
             .m = operands.u32("M", d.rows),
             .n = operands.u32("N", d.columns),
             .k = operands.u32("K", extents_of(a).columns),
             .lda8 = units("the stride of a", a, a.rank - 2),
             .ldb8 = units("the stride of b", b, b.rank - 2),
             .ldd = to.ld,
             .stride_a8 = a.rank == 3 ? units("the stride of a", a, 0) : 0,
             .stride_b8 = b.rank == 3 ? units("the stride of b", b, 0) : 0,
             .stride_d = to.batch,
             .from_list = p.rows != nullptr ? 1u : 0u,
             .accumulate = p.accumulate ? 1u : 0u};
    set_cut(kernel.constants, device.info(), cut);
    kernel.constants.tail = kernel.k % (2 * kUnit * cut.chunks()) != 0 ? 1 : 0;
    kernel.constants.aligned = to.aligned ? 1 : 0;
    if (p.rows == nullptr) {
        recording.dispatch(kernel, {operands.u32("tiles", div_up(d.rows, cut.rows())),
                                    operands.grid("tiles", div_up(d.columns, cut.columns())),
                                    operands.grid("batches", d.batch)});
        return;
    }
    const ops::GroupTiles& list = p.rows->tiles;
    kernel.tiles = list.tiles;
    kernel.begins = list.rows.begins.buffer;
    kernel.ends = list.rows.ends.buffer;
    kernel.constants.band *= cut.rows() / list.tile_rows;
    const BufferView grid =
        list.grid(d.columns, list.width_on_units * kGridColumns <= cut.columns());
    operands.require(static_cast<bool>(grid),
                     "the work list was not made for N = " + std::to_string(d.columns));
    recording.dispatch_indirect(kernel, grid);
}

} // namespace bellows::fp8
