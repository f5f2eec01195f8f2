// SPDX-License-Identifier: MIT
#include "direct.hpp"

#include "matrix_constants.hpp"
#include "operands.hpp"
#include "slots.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <iterator>
#include <limits>
#include <optional>

namespace bellows::fp8 {

namespace {

using K = kernels::GemmDirectNt;
using Units = GemmClass::Units;

constexpr std::uint32_t kUnit = 8;         // elements that an invocation reads at a time
constexpr std::uint32_t kRing = 3;         // segments of B in workgroup memory
constexpr std::uint64_t kGridColumns = 32; // of a step of a work list's grid
constexpr std::uint32_t kBand = 8;         // tiles along m that run together

struct Cut {
    MatrixShape shape;
    MatrixSlots slots;
    Tile tile;

    std::uint32_t rows() const { return shape.m * tile.fragments_m * tile.warps_m; }
    std::uint32_t columns() const { return shape.n * tile.fragments_n * tile.warps_n; }
    std::uint32_t warps() const { return tile.warps_m * tile.warps_n; }
    /// Units of a row in a segment.
    std::uint32_t chunks() const { return shape.k / slots.per_k; }
    std::uint32_t segment_k() const { return kUnit * chunks(); }
    std::uint32_t segment_units() const { return columns() * chunks(); }
};

/// What the shader declares.
std::uint64_t shared_bytes(const Cut& c) {
    return std::uint64_t{16} * kRing * c.segment_units();
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
    const Tile& t = c.tile;
    const std::uint64_t local_size = std::uint64_t{info.subgroup_size} * c.warps();
    return t.step_k == c.segment_k() && t.ahead == 1 && t.stages == kRing && t.warps_k == 1 &&
           c.rows() != 0 && t.fragments_n > 1 && c.columns() >= kGridColumns &&
           fits_workgroup(info, c.warps()) && kUnit % c.slots.per_k == 0 &&
           local_size % c.chunks() == 0 && c.segment_units() % local_size == 0 &&
           shared_bytes(c) <= info.shared_memory_bytes && together(info, c) != 0;
}

/// A tile in elements: what each subgroup computes, how many there are.
struct Plan {
    std::uint32_t warp_rows, warp_columns, warps_m, warps_n;
    std::uint64_t short_k = 0; ///< it is the usual one of sums of fewer k
};

// The first that fits is the usual one: TFLOPS of bf16 on an H200 at 4 x 8192 x 4096 x 7168 and
// 4 x 8192 x 7168 x 2048. Sums of 64 x 64 or 32 x 128 and what is read ahead leave few of 255
// registers: eight subgroups have a processor for themselves, of four two fit, and one stores while
// the other multiplies. 256 x 128 takes three quarters of the reads from the device's cache that
// 128 x 128 takes.
constexpr Plan kPlans[] = {
    {32, 128, 8, 1},      // 354, 327: 256 x 128 by 8 subgroups; A is read once, B by each
    {64, 64, 4, 2, 3072}, // 345, 332: 256 x 128 by 8
    {64, 64, 2, 4},       // 283, 261: 128 x 256 by 8, 48 KiB of workgroup memory, not 24
    {64, 64, 2, 2},       // 287, 281: 128 x 128 by 4
    {32, 128, 4, 1},      // 290, 279: 128 x 128 by 4
};

static_assert(std::size(kPlans) <= kMostOtherTiles + 1);

std::optional<Tile> tile_of(const Plan& plan, const Cut& cut) {
    if (plan.warp_rows % cut.shape.m != 0 || plan.warp_columns % cut.shape.n != 0)
        return std::nullopt;
    return Tile{.fragments_m = plan.warp_rows / cut.shape.m,
                .fragments_n = plan.warp_columns / cut.shape.n,
                .warps_m = plan.warps_m,
                .warps_n = plan.warps_n,
                .step_k = cut.segment_k(),
                .stages = kRing};
}

/// All that the device can run and this library knows, of sums of k the usual one first, or `named`
/// alone.
std::vector<Cut> cuts(const Device& device, const Tile& named, std::uint64_t k) {
    const GemmClass& c = gemm_class(device);
    const auto slots =
        c.units == Units::None ? std::nullopt : matrix_slots(device, c.shape, c.units);
    std::vector<Cut> result;
    if (!slots)
        return result;
    Cut cut{c.shape, *slots, named};
    if (named != Tile{}) {
        if (fits(device.info(), cut))
            result.push_back(cut);
        return result;
    }
    for (const Plan& plan : kPlans)
        if (const auto tile = tile_of(plan, cut))
            if (cut.tile = *tile; fits(device.info(), cut))
                result.insert(k < plan.short_k ? result.begin() : result.end(), cut);
    return result;
}

std::string name_of(const Cut& c) {
    return name_of(c.tile, c.rows(), c.columns()) + ", " + std::to_string(c.tile.warps_m) + "x" +
           std::to_string(c.tile.warps_n) + " subgroups, " + std::to_string(c.tile.stages) +
           " stages";
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
    using C = K::Constants;
    set_tile(c, info.subgroup_size, cut.shape, cut.tile);
    set_slots(c, cut.slots, {&C::a_place, &C::a_slot, &C::a_lane, &C::a_chunk},
              {&C::b_place, &C::b_slot, &C::b_lane, &C::b_chunk});
    c.warps_m = cut.tile.warps_m;
    c.warps_n = cut.tile.warps_n;
    c.together = together(info, cut);
}

} // namespace

std::string why_not_direct(const Device& device, const Tile& tile) {
    if (gemm_class(device).units == Units::None)
        return "the products of bf16 tensors use no matrix units here";
    if (gemm_class(device).native)
        return "the device's own code computes the products of bf16 tensors";
    const std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(variant_for(device, DType::F32)));
    if (!lacking.empty())
        return lacking;
    if (device.info().is_cpu && tile == Tile{})
        return "a CPU's matrices are slower than its f32 arithmetic";
    if (cuts(device, tile, 0).empty())
        return tile == Tile{} ? "no tile fits the device's matrices and its workgroup memory"
                              : kNoSuchTile;
    return "";
}

std::string why_not_direct(const Device& device, const Product& p, const Tile& tile) {
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
    if (std::string lacking = why_not_direct(device, tile); !lacking.empty())
        return lacking;
    if (p.rows == nullptr) {
        for (const TensorView* view : {&p.a.values, &p.b.values, &p.d})
            if (view->extent[view->rank - 2] * view->stride[view->rank - 2] * size_of(view->dtype) >
                kKernelReach)
                return "it takes matrices of up to 4 GiB";
        return "";
    }
    const std::uint32_t tile_rows =
        p.rows->listed() ? p.rows->tiles.tile_rows : group_tile_rows(device.info());
    if (cuts(device, tile, extents_of(p.a.values).columns).front().rows() % tile_rows != 0)
        return "the device's work lists have tiles of " + std::to_string(tile_rows) + " rows";
    return "";
}

bool better_direct(const Device& device, const Product& p) {
    if (device.info().is_cpu || gemm_class(device).units != Units::BF16)
        return false;
    constexpr std::uint64_t kRows = 256, kColumns = 128; // of a tile
    return !masked(p) && expected_rows(p) >= kRows && extents_of(p.d).columns >= kColumns;
}

std::string direct_class(const Device& device) {
    const GemmClass& c = gemm_class(device);
    return c.units == Units::None
               ? c.name
               : std::string(c.units == Units::BF16 ? "direct-bf16-k" : "direct-f16-k") +
                     std::to_string(c.shape.k);
}

std::vector<NamedTile> direct_tiles(const Device& device, const Product& p) {
    std::vector<NamedTile> tiles;
    for (const Cut& cut : cuts(device, {}, extents_of(p.a.values).columns))
        if (why_not_direct(device, p, cut.tile).empty())
            tiles.push_back({cut.tile, name_of(cut)});
    return tiles;
}

void record_direct(Recording& recording, const char* op, const Product& p, const Tile& tile) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    const Device& device = recording.device();
    const Cut cut = cuts(device, tile, extents_of(p.a.values).columns).front();
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
    kernel.constants.tail = kernel.k % (2 * cut.segment_k()) != 0 ? 1 : 0;
    kernel.constants.aligned = to.aligned ? 1 : 0;
    kernel.constants.band = kBand;
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
    kernel.constants.band = kBand * cut.rows() / list.tile_rows;
    const BufferView grid =
        list.grid(d.columns, list.width_on_units * kGridColumns <= cut.columns());
    operands.require(static_cast<bool>(grid),
                     "the work list was not made for N = " + std::to_string(d.columns));
    recording.dispatch_indirect(kernel, grid);
}

} // namespace bellows::fp8
