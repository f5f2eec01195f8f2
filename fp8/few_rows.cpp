// SPDX-License-Identifier: MIT
#include "few_rows.hpp"

#include "matrix_constants.hpp"
#include "stream_operands.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <bit>
#include <optional>

namespace bellows::fp8 {

namespace {

using K = kernels::Fp8FewGemm;
using Form = GroupLayout::Form;

constexpr std::uint64_t kScaleBlock = 128; // of weights, along n and k
constexpr std::uint64_t kMostIdsAtOnce = 16;
constexpr std::uint32_t kSplitK = 4; // sums are added in this order, whatever the rows
constexpr std::uint32_t kMostAhead = 4;

struct Cut {
    MatrixShape shape;
    Tile tile; ///< ahead: blocks of 128 k
    MatrixSlots slots;

    /// Of A at a time, and columns of D.
    std::uint32_t rows() const { return shape.n * tile.fragments_m; }
    std::uint32_t columns() const { return shape.m * tile.fragments_n * tile.warps_n; }
    std::uint32_t subgroups() const { return tile.warps_n * tile.warps_k; }
};

/// What the shader declares, with some room for its words.
std::uint64_t shared_bytes(const Cut& c) {
    const std::uint64_t pitch = c.shape.m * c.tile.fragments_n / 4 + 1;
    return 16 * c.subgroups() * c.shape.n * pitch + std::uint64_t{4} * c.rows() * c.subgroups() +
           64;
}

bool fits(const DeviceInfo& info, const Cut& c) {
    const std::uint64_t local_size = std::uint64_t{info.subgroup_size} * c.subgroups();
    const Tile& t = c.tile;
    return t.warps_k != 0 && c.columns() != 0 && kScaleBlock % c.columns() == 0 && c.rows() != 0 &&
           t.ahead != 0 && t.ahead <= kMostAhead && local_size <= info.max_workgroup_invocations &&
           shared_bytes(c) <= info.shared_memory_bytes && 8 % (c.shape.k / c.slots.per_k) == 0 &&
           t.warps_m == 1 && t.step_k == 0 && t.stages == 1;
}

/// For sums, those of a block and a matrix, A in f16, and operands of the blocks ahead.
std::uint64_t registers(const DeviceInfo& info, const Cut& c) {
    const std::uint64_t columns = std::uint64_t{c.shape.m} * c.tile.fragments_n;
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

/// For so many rows of a group, as few as an H200 does well with.
Tile tile_for(const MatrixShape& shape, std::uint64_t rows) {
    const auto fragments = [](std::uint64_t extent, std::uint32_t side) {
        return static_cast<std::uint32_t>(std::max<std::uint64_t>(div_up(extent, side), 1));
    };
    const std::uint64_t height = rows <= 5 ? 8 : rows <= 12 ? 16 : rows <= 20 ? 24 : 32;
    const bool few = rows <= 5; // leave registers for loads of two blocks
    return {.fragments_m = fragments(height, shape.n),
            .fragments_n = fragments(few ? 32 : 64, shape.m),
            .warps_k = kSplitK,
            .ahead = few ? 2u : 1u};
}

/// Nothing when the device has no such matrices.
std::optional<Cut> cut_for(const Device& device, const Product& p, const Tile& tile = {}) {
    const auto shape = matrix_shape(device.info());
    if (!shape)
        return std::nullopt;
    const auto slots = matrix_slots(device, *shape);
    if (!slots)
        return std::nullopt;
    const Cut cut{*shape, tile != Tile{} ? tile : tile_for(*shape, expected_rows(p)), *slots};
    return fits(device.info(), cut) ? std::optional(cut) : std::nullopt;
}

void set_cut(K::Constants& c, const DeviceInfo& info, const Cut& cut) {
    using C = K::Constants;
    set_tile(c, info.subgroup_size, cut.shape, cut.tile);
    set_slots(c, cut.slots, {&C::w_place, &C::w_slot, &C::w_lane, &C::w_chunk},
              {&C::x_place, &C::x_slot, &C::x_lane, &C::x_chunk});
    c.warps_n = cut.tile.warps_n;
    c.warps_k = cut.tile.warps_k;
    c.ahead = cut.tile.ahead;
    c.sum_place = cut.slots.sum.place;
    c.sum_slot = cut.slots.sum.slot;
    c.sum_lane = cut.slots.sum.lane;
    c.sum_slots = cut.slots.sum_slots;
}

/// Where the rows of groups stand; returns how many groups, batches or ids the grid has.
std::uint64_t set_rows(K& kernel, const Operands& operands, const Product& p,
                       std::uint32_t subgroup_size) {
    kernel.places = kernel.ends = kernel.b_codes;
    if (p.rows == nullptr) {
        kernel.constants.rows_from = 0;
        return extents_of(p.d).batch;
    }
    const GroupLayout& layout = p.rows->layout;
    kernel.groups = operands.u32("groups", layout.groups);
    kernel.spacing = operands.u32("the spacing of groups", layout.spacing);
    kernel.places = layout.values.buffer;
    switch (layout.form) {
    case Form::Ids: {
        const bool few = layout.rows < layout.groups;
        const std::uint64_t reads = div_up(layout.rows, subgroup_size);
        kernel.constants.ids_at_once = static_cast<std::uint32_t>(
            std::clamp<std::uint64_t>(std::bit_ceil(reads), 1, kMostIdsAtOnce));
        kernel.constants.rows_from = few ? 2 : 1;
        kernel.m = operands.u32("ids", layout.rows);
        kernel.constants.a_by_slot = kernel.constants.d_by_slot = 1;
        kernel.slots_per_a_row = std::max(p.rows->slots_per_a_row, 1u);
        kernel.spacing = 0;
        if (layout.values.row_count) {
            kernel.ends = layout.values.row_count;
            kernel.spacing = operands.u32("top_k", layout.values.extent[1]);
        }
        return few ? layout.rows : layout.groups;
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

} // namespace

std::string why_not_few_rows(const Device& device, const Product& p, const Tile& tile) {
    if (std::string lacking = why_not_on_units<K>(device, p, tile); !lacking.empty())
        return lacking;
    if (p.rows != nullptr && p.rows->layout.form == Form::RowGroups && !p.rows->tiles.tiles)
        return "groups of rows need a work list";
    if (!cut_for(device, p, tile))
        return no_cut(tile);
    return "";
}

std::string few_rows_class(const Device& device, const Product& p) {
    const Cut cut = cut_for(device, p).value();
    return "streamed-in-" + std::to_string(cut.tile.warps_k) + "-f16-k" +
           std::to_string(cut.shape.k);
}

std::vector<NamedTile> few_rows_tiles(const Device& device, const Product& p) {
    return changed_tiles(device.info(), cut_for(device, p).value(),
                         {[](Tile& t) { t.ahead = 3 - t.ahead; },
                          [](Tile& t) { t.fragments_n /= 2; },
                          [](Tile& t) { t.fragments_n /= 2, t.ahead = 2; },
                          [](Tile& t) { t.fragments_n *= 2, t.ahead = 1; },
                          [](Tile& t) { t.warps_n *= 2; }, [](Tile& t) { t.fragments_m /= 2; }});
}

void record_few_rows(Recording& recording, const char* op, const Product& p, const Tile& tile) {
    const Operands operands(op);
    const Cut cut = cut_for(recording.device(), p, tile).value();
    K kernel;
    kernel.variant = p.d.dtype == DType::BF16 ? K::Variant::f16_bf16 : K::Variant::f16_f32;
    bind_others(kernel, operands, p);
    bind_a(kernel, operands, *p.a.quantized, StreamA<K>{&K::a_codes, &K::lda16, &K::a_batch16});
    set_cut(kernel.constants, recording.device().info(), cut);
    kernel.constants.whole = kernel.k % kScaleBlock == 0 ? 1 : 0;
    const std::uint64_t groups =
        set_rows(kernel, operands, p, recording.device().info().subgroup_size);
    recording.dispatch(kernel, {operands.u32("tiles", div_up(kernel.n, cut.columns())),
                                operands.grid("groups", groups),
                                operands.grid("rows", turns(p, cut.rows()))});
}

} // namespace bellows::fp8
