// SPDX-License-Identifier: MIT
#include "stream_units.hpp"

#include "matrix_constants.hpp"
#include "stream_operands.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>
#include <concepts>
#include <optional>

namespace bellows::fp8 {

namespace {

using Few = kernels::Fp8FewGemm;
using Shared = kernels::Fp8StreamGemm; // rows of A pass workgroup memory
using Form = GroupLayout::Form;

constexpr std::uint64_t kScaleBlock = 128; // of weights, along n and k
constexpr std::uint32_t kSplitK = 4;       // sums are added in this order, whatever the rows
constexpr std::uint32_t kMostAhead = 4;
/// Of a group on average, for Few; measured on an H200.
constexpr std::uint64_t kMostFewRows = 5;

struct Cut {
    MatrixShape shape;
    Tile tile; ///< ahead: blocks of 128 k; step_k: 128 where rows of A pass workgroup memory
    MatrixSlots slots;

    /// Of A at a time, and columns of D.
    std::uint32_t rows() const { return shape.n * tile.fragments_m; }
    std::uint32_t columns() const { return shape.m * tile.fragments_n * tile.warps_n; }
    std::uint32_t subgroups() const { return tile.warps_n * tile.warps_k; }
    bool shares() const { return tile.step_k != 0; }
};

/// What the shader declares, with some room for its words.
std::uint64_t shared_bytes(const Cut& c) {
    const std::uint64_t pitch = c.shape.m * c.tile.fragments_n / 4 + 1;
    const std::uint64_t sums = 16 * c.subgroups() * c.shape.n * pitch;
    const std::uint64_t rows = c.rows();
    return c.shares() ? std::max(2 * kScaleBlock * rows, sums) + 8 * rows + 4 * c.subgroups() + 64
                      : sums + 4 * rows * c.subgroups() + 64;
}

bool fits(const DeviceInfo& info, const Cut& c) {
    const Tile& t = c.tile;
    const bool known = c.shares() ? t.step_k == kScaleBlock && t.warps_k == 1 && t.ahead <= 2
                                  : t.ahead <= kMostAhead;
    return known && t.ahead != 0 && t.warps_k != 0 && c.columns() != 0 &&
           kScaleBlock % c.columns() == 0 && c.rows() != 0 && fits_workgroup(info, c.subgroups()) &&
           shared_bytes(c) <= info.shared_memory_bytes && 8 % (c.shape.k / c.slots.per_k) == 0 &&
           8 % c.slots.per_k == 0 && t.warps_m == 1 && t.stages == 1;
}

/// For sums, those of a block and a matrix, A in f16, and operands of the blocks ahead; where
/// subgroups share A for sums, weights, and an invocation's part of A.
std::uint64_t registers(const DeviceInfo& info, const Cut& c) {
    const std::uint64_t columns = std::uint64_t{c.shape.m} * c.tile.fragments_n;
    if (c.shares())
        return (c.rows() * columns +
                (c.tile.ahead * columns + c.rows() / c.tile.warps_n) * kScaleBlock / 4) /
               info.subgroup_size;
    return (c.rows() * (columns + c.shape.m + kScaleBlock / 2) +
            c.tile.ahead * (c.rows() + columns) * kScaleBlock / 4) /
           info.subgroup_size;
}

/// Those of fewest columns, the largest of them.
std::optional<MatrixShape> matrix_shape(const DeviceInfo& info) {
    std::optional<MatrixShape> best;
    for (const MatrixShape& s : matrix_shapes(info, GemmClass::Units::F16)) {
        if (!best || s.n < best->n || (s.n == best->n && s.m * s.k > best->m * best->k))
            best = s;
    }
    return best;
}

std::uint32_t matrices(std::uint64_t extent, std::uint32_t side) {
    return static_cast<std::uint32_t>(std::max<std::uint64_t>(div_up(extent, side), 1));
}

/// For so many rows of a group, as few as an H200 does well with.
Tile few_tile(const MatrixShape& shape, std::uint64_t rows) {
    const std::uint64_t height = rows <= 5 ? 8 : rows <= 12 ? 16 : rows <= 20 ? 24 : 32;
    const bool few = height == 8; // leave registers for loads of two blocks
    return {.fragments_m = matrices(height, shape.n),
            .fragments_n = matrices(few ? 32 : 64, shape.m),
            .warps_k = kSplitK,
            .ahead = few ? 2u : 1u};
}

/// With some room, as a group whose rows take two turns takes twice as long. Weights are loaded two
/// blocks ahead where registers last, or where there are so many workgroups that fewer at a time
/// take no more turns; measured.
Tile sharing_tile(const MatrixShape& shape, const Product& p) {
    constexpr std::uint64_t kTallest = 80, kStep = 16, kColumns = 128, kManyWorkgroups = 512;
    const std::uint64_t rows = expected_rows(p);
    const std::uint64_t wanted = p.rows == nullptr ? rows : rows + rows / 4 + 6;
    const std::uint64_t height = std::min(round_up(wanted, kStep), kTallest);
    const Extents weights = extents_of(p.b.values); // [groups, n, k]
    const std::uint64_t workgroups = weights.batch * div_up(weights.rows, kColumns);
    const bool two = height == 32 || height == 48 || (height == 16 && workgroups > kManyWorkgroups);
    return {.fragments_m = matrices(height, shape.n),
            .fragments_n = matrices(32, shape.m),
            .warps_n = 4,
            .step_k = kScaleBlock,
            .ahead = two ? 2u : 1u};
}

/// Nothing when the device has no such matrices.
std::optional<Cut> cut_for(const Device& device, const Product& p, const Tile& tile = {}) {
    const auto shape = matrix_shape(device.info());
    if (!shape)
        return std::nullopt;
    const auto slots = matrix_slots(device, *shape);
    if (!slots)
        return std::nullopt;
    const auto fitting = [&](const Tile& t) {
        const Cut cut{*shape, t, *slots};
        return fits(device.info(), cut) ? std::optional(cut) : std::nullopt;
    };
    if (tile != Tile{})
        return fitting(tile);
    if (expected_rows(p) > kMostFewRows)
        if (const auto shared = fitting(sharing_tile(*shape, p)))
            return shared;
    return fitting(few_tile(*shape, expected_rows(p)));
}

template <class C>
void set_cut(C& c, const DeviceInfo& info, const Cut& cut) {
    set_tile(c, info.subgroup_size, cut.shape, cut.tile);
    set_slots(c, cut.slots, {&C::w_place, &C::w_slot, &C::w_lane, &C::w_chunk},
              {&C::x_place, &C::x_slot, &C::x_lane, &C::x_chunk});
    c.warps_n = cut.tile.warps_n;
    c.ahead = cut.tile.ahead;
    if constexpr (std::same_as<C, Few::Constants>) {
        c.warps_k = cut.tile.warps_k;
        c.sum_place = cut.slots.sum.place;
        c.sum_slot = cut.slots.sum.slot;
        c.sum_lane = cut.slots.sum.lane;
        c.sum_slots = cut.slots.sum_slots;
    }
}

/// Ids that an invocation of so many that look through them reads together.
std::uint32_t ids_at_once(std::uint64_t ids, std::uint64_t invocations, std::uint64_t most) {
    return static_cast<std::uint32_t>(
        std::clamp<std::uint64_t>(std::bit_ceil(div_up(ids, invocations)), 1, most));
}

/// Where the rows of groups stand; returns how many groups, batches or ids the grid has.
template <class K>
std::uint64_t set_rows(K& kernel, const Operands& operands, const Product& p,
                       std::uint32_t subgroup_size) {
    constexpr bool kFew = std::same_as<K, Few>;
    kernel.places = kernel.ends = kernel.b_codes;
    if (p.rows == nullptr) {
        kernel.constants.rows_from = 0;
        return extents_of(p.d).batch;
    }
    const GroupLayout& layout = p.rows->layout;
    if constexpr (kFew)
        kernel.groups = operands.u32("groups", layout.groups);
    kernel.spacing = operands.u32("the spacing of groups", layout.spacing);
    kernel.places = layout.values.buffer;
    switch (layout.form) {
    case Form::Ids: {
        const bool fewer = kFew && layout.rows < layout.groups;
        kernel.constants.ids_at_once =
            kFew ? ids_at_once(layout.rows, subgroup_size, 16)
                 : ids_at_once(layout.rows, kernel.constants.local_size, 32);
        kernel.constants.rows_from = fewer ? 2 : 1;
        kernel.m = operands.u32("ids", layout.rows);
        kernel.constants.a_by_slot = kernel.constants.d_by_slot = 1;
        kernel.slots_per_a_row = std::max(p.rows->slots_per_a_row, 1u);
        kernel.spacing = 0;
        if (layout.values.row_count) {
            kernel.ends = layout.values.row_count;
            kernel.spacing = operands.u32("top_k", layout.values.extent[1]);
        }
        return fewer ? layout.rows : layout.groups;
    }
    case Form::Masked:
        kernel.constants.rows_from = 3;
        break;
    case Form::PrefixSums:
        kernel.constants.rows_from = 4;
        break;
    case Form::AlignedEnds:
        kernel.constants.rows_from = 5;
        break;
    case Form::RowGroups:
        kernel.constants.rows_from = 6;
        kernel.places = p.rows->tiles.rows.begins.buffer;
        kernel.ends = p.rows->tiles.rows.ends.buffer;
        break;
    }
    return layout.groups;
}

/// Turns that run side by side.
std::uint64_t turns(const Product& p, std::uint32_t rows) {
    const std::uint64_t most = p.rows == nullptr ? extents_of(p.d).rows : p.rows->layout.rows;
    return std::min<std::uint64_t>(div_up(most, rows), div_up(expected_rows(p), rows));
}

template <class K>
void record(Recording& recording, const Operands& operands, const Product& p, const Cut& cut) {
    const DeviceInfo& info = recording.device().info();
    K kernel;
    kernel.variant = p.d.dtype == DType::BF16 ? K::Variant::f16_bf16 : K::Variant::f16_f32;
    bind_others(kernel, operands, p);
    bind_a(kernel, operands, *p.a.quantized, StreamA<K>{&K::a_codes, &K::lda16, &K::a_batch16});
    set_cut(kernel.constants, info, cut);
    kernel.constants.whole = kernel.k % kScaleBlock == 0 ? 1 : 0;
    const std::uint64_t groups = set_rows(kernel, operands, p, info.subgroup_size);
    recording.dispatch(kernel, {operands.u32("tiles", div_up(kernel.n, cut.columns())),
                                operands.grid("groups", groups),
                                operands.grid("rows", turns(p, cut.rows()))});
}

} // namespace

std::string why_not_stream_units(const Device& device, const Product& p, const Tile& tile) {
    if (device.info().is_cpu && tile == Tile{})
        return "a CPU's matrices are slower than its f32 arithmetic";
    for (const KernelInfo* kernel : {&Few::info(), &Shared::info()}) {
        // Both variants of either want the same.
        const auto variant = static_cast<std::uint32_t>(Few::Variant::f16_f32);
        if (std::string lacking = device.why_not(*kernel, variant); !lacking.empty())
            return lacking;
    }
    for (const Operand* o : {&p.a, &p.b})
        if (!o->quantized || o->quantized->recipe.rule != ScaleRule::PowerOfTwo)
            return "matrix units take e4m3 operands with power-of-two scales";
    if (p.b.quantized->recipe.blocks != Blocks::Blocks128)
        return "matrix units take weights in 128x128 blocks";
    if (!cut_for(device, p, tile))
        return tile == Tile{} ? "the device has no subgroup matrices of f16 that fit" : kNoSuchTile;
    return "";
}

std::string stream_units_class(const Device& device, const Product& p) {
    const Cut cut = cut_for(device, p).value();
    return "streamed-" + (cut.shares() ? "" : "in-" + std::to_string(cut.tile.warps_k) + "-") +
           "f16-k" + std::to_string(cut.shape.k);
}

std::vector<NamedTile> stream_units_tiles(const Device& device, const Product& p) {
    const Cut usual = cut_for(device, p).value();
    const auto name = [](const Cut& c) { return name_of(c.tile, c.rows(), c.columns()); };
    TileList list(usual.tile, name(usual));
    const auto add = [&](auto change) {
        Cut cut = usual;
        change(cut.tile);
        if (fits(device.info(), cut) && registers(device.info(), cut) <= kMostRegisters)
            list.add(cut.tile, name(cut));
    };
    if (usual.shares()) {
        add([](Tile& t) { t.ahead = 3 - t.ahead; });
        add([](Tile& t) { t.fragments_m -= std::min(t.fragments_m, 2u); });
        add([](Tile& t) { t.fragments_m += 2; });
        add([](Tile& t) { t.fragments_n /= 2, t.warps_n *= 2; });
        add([](Tile& t) { t.warps_n /= 2; });
    } else {
        add([](Tile& t) { t.ahead = 3 - t.ahead; });
        add([](Tile& t) { t.fragments_n /= 2; });
        add([](Tile& t) { t.fragments_n /= 2, t.ahead = 2; });
        add([](Tile& t) { t.fragments_n *= 2, t.ahead = 1; });
        add([](Tile& t) { t.warps_n *= 2; });
        add([](Tile& t) { t.fragments_m /= 2; });
    }
    return list.take();
}

void record_stream_units(Recording& recording, const char* op, const Product& p, const Tile& tile) {
    const Operands operands(op);
    const Cut cut = cut_for(recording.device(), p, tile).value();
    if (cut.shares())
        record<Shared>(recording, operands, p, cut);
    else
        record<Few>(recording, operands, p, cut);
}

} // namespace bellows::fp8
