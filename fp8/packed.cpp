// SPDX-License-Identifier: MIT
#include "packed.hpp"

#include "operands.hpp"
#include "pack.hpp"
#include "slots.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <optional>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kTile = 128; // along m, n and the sum
constexpr std::uint64_t kLocalSize = 128;
constexpr std::uint32_t kMostStores = 8; // UP_TO_8 of the kernel

std::uint64_t groups_of(const Product& p) {
    return p.rows == nullptr ? 0 : p.rows->layout.groups;
}

// --- The kernel's cut: constants of shaders/fp8_packed_gemm.comp

struct Cut {
    MatrixUnits units;
    Tile tile; ///< ahead: of B

    /// Matrices of a row that are stored together.
    std::uint32_t together() const { return std::min(tile.fragments_n, 2u); }
    std::uint32_t rows() const { return units.shape.m * tile.fragments_m * tile.warps_m; }
    std::uint32_t columns() const { return units.shape.n * tile.fragments_n * tile.warps_n; }
    std::uint32_t subgroups() const { return tile.warps_m * tile.warps_n * tile.warps_k; }
    /// Tiles of B side by side.
    std::uint32_t wide() const { return columns() / static_cast<std::uint32_t>(kTile); }
};

std::uint32_t subgroups(const MatrixUnits& units) {
    return static_cast<std::uint32_t>(kLocalSize) / units.subgroup;
}
std::uint32_t matrices(std::uint32_t side) {
    return static_cast<std::uint32_t>(kTile) / side;
}

/// Whether the kernel's head comment is kept.
bool serves(const Cut& cut) {
    const MatrixShape& shape = cut.units.shape;
    const Tile& t = cut.tile;
    if (t.fragments_m == 0 || t.fragments_n == 0 || t.step_k != 0 || t.stages != 1 ||
        t.ahead == 0 || t.ahead > 4)
        return false;
    const std::uint32_t quads = cut.together() * shape.n / 4;
    const std::uint32_t sharers = cut.units.subgroup * t.warps_k;
    const std::uint32_t most = cut.wide() * subgroups(cut.units);
    return (cut.subgroups() == subgroups(cut.units) || cut.subgroups() == most) &&
           cut.columns() % kTile == 0 && matrices(shape.n) % t.fragments_n == 0 &&
           (cut.wide() == 1 || (cut.wide() <= 4 && t.warps_k == 1)) &&
           matrices(shape.m) % (t.fragments_m * t.warps_m) == 0 &&
           std::max(t.fragments_m, t.fragments_n / cut.together()) <= kMostStores &&
           sharers % quads == 0 && shape.m * quads % sharers == 0;
}

/// For sums, A of this step and the next, B of this step and those ahead.
std::uint64_t registers(const Cut& cut) {
    const MatrixShape& shape = cut.units.shape;
    const Tile& t = cut.tile;
    const std::uint64_t sums = std::uint64_t{t.fragments_m} * t.fragments_n * shape.m * shape.n;
    const std::uint64_t a = std::uint64_t{16} * t.fragments_m * shape.m;
    const std::uint64_t b = std::uint64_t{8} * t.fragments_n * shape.n;
    return (sums + 2 * a + (1 + t.ahead) * b) / cut.units.subgroup;
}

/// What the shader declares.
std::uint64_t shared_bytes(const Cut& cut) {
    const std::uint64_t quads = cut.together() * cut.units.shape.n / 4;
    return 16 * cut.subgroups() * cut.units.shape.m * (quads + 1);
}

/// Whether a device that runs the usual tile runs this one.
bool fits(const DeviceInfo& info, const Cut& cut) {
    return fits_workgroup(info, cut.subgroups()) && shared_bytes(cut) <= info.shared_memory_bytes;
}

/// How tiles for few rows are cut, for groups of up to so many on average; a group with more rows
/// than the tile is high reads its weights again. On an H200 these won.
struct FlatTile {
    std::uint64_t rows;
    std::uint32_t height, ahead;
    std::uint32_t split_from; ///< 0: subgroups share the columns; else the sum over k, and so many
                              ///< or more of them the columns
    std::uint32_t wide = 1;   ///< times the usual columns
    bool more_subgroups = false; ///< and times the subgroups, not the columns of each
    std::uint64_t least_k = 0;   ///< shorter sums take the next that serves
};
constexpr FlatTile kFlatTiles[] = {
    {10, 16, 2, 2},                // each code of B is loaded once, early
    {24, 32, 1, 0, 4, true, 4096}, // fewer workgroups, which have more to do
    {24, 32, 2, 0},
    {kFewRows, 64, 1, 2},
};

std::optional<Cut> flat_cut(const MatrixUnits& units, const FlatTile& tile) {
    Cut cut{units, {}};
    Tile& t = cut.tile;
    const std::uint32_t warps = subgroups(units) * (tile.more_subgroups ? tile.wide : 1);
    t.ahead = tile.ahead;
    t.fragments_m = std::max(1u, tile.height / units.shape.m);
    for (t.warps_n = tile.split_from == 0 ? warps : tile.split_from; t.warps_n <= warps;
         t.warps_n *= 2) {
        t.warps_k = warps / t.warps_n;
        t.fragments_n = tile.wide * matrices(units.shape.n) / t.warps_n;
        if (serves(cut))
            return cut;
    }
    return std::nullopt;
}

/// Sums for many rows, shared out along both sides.
std::optional<Cut> square_cut(const MatrixUnits& units, std::uint32_t height = kTile,
                              std::uint32_t ahead = 1, std::uint32_t wide = 1) {
    Cut cut{units, {}};
    Tile& t = cut.tile;
    while (t.warps_m * t.warps_n < subgroups(units))
        (t.warps_m <= t.warps_n ? t.warps_m : t.warps_n) *= 2;
    t.fragments_m = height / units.shape.m / t.warps_m;
    t.fragments_n = matrices(units.shape.n) / t.warps_n;
    t.warps_n *= wide;
    t.ahead = ahead;
    return serves(cut) ? std::optional(cut) : std::nullopt;
}

std::optional<Cut> cut_for(const Device& device, std::uint64_t rows, std::uint64_t k = 0) {
    const std::optional<MatrixUnits> units = units_for_images(device);
    if (!units)
        return std::nullopt;
    for (const FlatTile& tile : kFlatTiles)
        if (rows <= tile.rows && k >= tile.least_k)
            if (const std::optional<Cut> cut = flat_cut(*units, tile);
                cut && fits(device.info(), *cut))
                return cut;
    return square_cut(*units);
}

std::string name_of(const Cut& cut) {
    return name_of(cut.tile, cut.rows(), cut.columns());
}

std::optional<Cut> cut_for(const Device& device, const Product& p) {
    return p.form == GemmForm::TN
               ? cut_for(device, kTile)
               : cut_for(device, expected_rows(p), extents_of(p.a.values).columns);
}

/// The largest number of groups that either operand may be cut into.
std::uint64_t most_groups(const Operand& a, const Operand& b) {
    std::uint64_t groups = std::max<std::uint64_t>(extents_of(b.values).batch, 1);
    for (const Operand* o : {&a, &b})
        if (o->quantized && o->quantized->group_offsets.buffer)
            groups = std::max(groups, o->quantized->group_offsets.extent[0] - 1);
    return groups;
}

} // namespace

std::string why_not_packed(const Device& device) {
    using K = kernels::Fp8PackedGemm;
    const std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(K::Variant::f16_f32));
    if (!lacking.empty())
        return lacking;
    const std::optional<Cut> cut = cut_for(device, kTile);
    if (!cut)
        return "the device has no subgroup matrices of f16 that tiles of 128 x 128 can be cut into";
    return why_no_matrix_images(device, cut->units.shape);
}

std::string why_not_packed(const Device& device, const Product& p, const Tile& tile) {
    for (const Operand* o : {&p.a, &p.b}) {
        if (!o->quantized || o->quantized->recipe.format != Format::E4M3 ||
            o->quantized->recipe.rule != ScaleRule::PowerOfTwo)
            return "it takes e4m3 operands with power-of-two scales";
        const Blocks blocks = o->quantized->recipe.blocks;
        if (blocks == Blocks::PerTensor || blocks == Blocks::MX32)
            return "it takes scales of 128 along k";
        if (extents_of(o->values).rows == 0 || extents_of(o->values).columns == 0)
            return "it needs operands that are not empty";
    }
    if (p.form == GemmForm::TN && p.rows != nullptr &&
        (p.a.quantized->recipe.blocks != Blocks::Columns128 ||
         p.b.quantized->recipe.blocks != Blocks::Columns128))
        return "scales of 128x128 may straddle groups";
    // Of TN by the tiles of all rows that could be there; A's images of others by those that are.
    const std::uint64_t groups = most_groups(p.a, p.b);
    if (packed_bytes(*p.b.quantized, Side::B, groups) > kKernelReach ||
        (p.form == GemmForm::TN && packed_bytes(*p.a.quantized, Side::A, groups) > kKernelReach))
        return "an operand's image would be larger than the 4 GiB that kernels reach";
    if (std::string lacking = why_not_packed(device); !lacking.empty())
        return lacking;
    if (p.form != GemmForm::TN && p.rows != nullptr && !p.rows->listed() &&
        !packed_reads_layout(p) && group_tile_rows(device.info()) != kTile)
        return "the device's work lists have no tiles of 128 rows";
    if (p.form != GemmForm::TN && p.rows != nullptr && p.rows->listed() &&
        (p.rows->tiles.tile_rows != kTile || p.rows->tiles.width_on_units * 32 != kTile))
        return "the device's work lists have no tiles of 128 x 128";
    const Cut named{units_for_images(device).value(), tile};
    if (tile != Tile{} && !(serves(named) && fits(device.info(), named)))
        return kNoSuchTile;
    return "";
}

std::string packed_class(const Device& device, const Product& p) {
    const std::optional<Cut> cut = cut_for(device, p);
    if (!cut)
        return "packed-f16";
    const std::string name = "packed-f16-k" + std::to_string(cut->units.shape.k);
    const std::uint32_t parts = cut->tile.warps_k;
    return parts == 1 ? name : name + "-in-" + std::to_string(parts);
}

std::vector<NamedTile> packed_tiles(const Device& device, const Product& p) {
    const Cut usual = cut_for(device, p).value();
    const std::uint32_t parts = usual.tile.warps_k;
    TileList list(usual.tile, name_of(usual));
    const auto add = [&](const std::optional<Cut>& cut) {
        if (cut && cut->tile.warps_k == parts && fits(device.info(), *cut) &&
            (device.info().is_cpu || registers(*cut) <= kMostRegisters))
            list.add(cut->tile, name_of(*cut));
    };
    // Two tiles of B read A once, and its weights as often as one.
    if (parts == 1) {
        add(square_cut(usual.units, usual.rows(), usual.tile.ahead, 2));
        if (p.form != GemmForm::TN)
            add(flat_cut(usual.units, {0, std::min(usual.rows(), 64u), usual.tile.ahead, 0, 2}));
    }
    // Lower ones take fewer registers, and read B more often where there are more rows.
    for (const std::uint32_t ahead : {1u, 2u, 4u})
        for (const std::uint32_t height : {usual.rows(), usual.rows() / 2})
            add(parts > 1 ? flat_cut(usual.units, {0, height, ahead, usual.tile.warps_n})
                          : square_cut(usual.units, height, ahead));
    return list.take();
}

bool better_packed(const Device& device, const Product& p) {
    if (device.info().is_cpu || gemm_class(device).units == GemmClass::Units::None)
        return false;
    // The device's own code is so much faster that decoded operands win where many rows share what
    // decoding a weight takes (a step of a model of 1.3 billion parameters on an H200: 71.7
    // thousand tokens/s against 61.0).
    constexpr std::uint64_t kRowsPayDecoding = 512;
    if (gemm_class(device).native &&
        (p.form == GemmForm::TN || expected_rows(p) >= kRowsPayDecoding))
        return false;
    // Few rows do not pay for packing the weights.
    const Extents d = extents_of(p.d);
    const std::uint64_t groups = std::max<std::uint64_t>(groups_of(p), 1);
    if (p.form == GemmForm::TN) {
        // Units of bf16 take less time than packing does, but for long sums of many elements: on an
        // H200 packing codes paid from 2048 rows on where D had 14 million elements, with 8192 by
        // 10 %, and did not where it had 4 million. (A table, which knows no more rows than 512,
        // goes by 1024.)
        const bool pays =
            gemm_class(device).units != GemmClass::Units::BF16 ||
            (expected_rows(p) >= 2048 && d.rows * d.columns >= std::uint64_t{1} << 23);
        return pays && d.rows >= kTile && d.columns >= kTile;
    }
    return !masked(p) && d.rows >= kTile * groups && d.columns >= kTile;
}

std::uint64_t packed_bytes(const Operand& a, const Operand& b) {
    if (!a.quantized || !b.quantized)
        return 0;
    const std::uint64_t groups = most_groups(a, b);
    return packed_bytes(*a.quantized, Side::A, groups) +
           (packed_ahead(b) ? 0 : packed_bytes(*b.quantized, Side::B, groups));
}

std::uint64_t packed_ahead_bytes(const Device& device, const Quantized& b) {
    return why_not_packed(device).empty() ? prepacked_bytes(b) : 0;
}

bool packed_ahead(const Operand& b) {
    return b.prepacked && b.prepacked->variant == Variant::Packed;
}

void pack_ahead(Recording& recording, const Operands& operands, const Quantized& b, GemmForm form,
                BufferView memory, std::uint64_t first, std::uint64_t count) {
    const Blocks own = form == GemmForm::NT ? Blocks::Rows128 : Blocks::Columns128;
    operands.require(b.recipe.format == Format::E4M3 && b.recipe.rule == ScaleRule::PowerOfTwo &&
                         (b.recipe.blocks == Blocks::Blocks128 || b.recipe.blocks == own),
                     "b is " + describe(Operand(b)) +
                         ", wanted is e4m3 with power-of-two scales of 128 along k");
    const MatrixUnits units = units_for_images(recording.device()).value();
    const Source source{b, Side::B, form == GemmForm::NN};
    const Packed packed = place(units, source, memory);
    if (count == extents_of(b.codes).batch) {
        pack(recording, operands, units, source, packed);
        return;
    }
    Quantized some = b;
    some.codes = b.codes.rows(first, count);
    some.scales = b.scales.rows(first, count);
    pack(recording, operands, units, {some, Side::B, form == GemmForm::NN},
         entries(units, source, packed, first, count));
}

bool packed_reads_layout(const Product& p) {
    constexpr std::uint64_t kMostTiles = 8; // of a group, each a workgroup that may find no rows
    if (!masked(p) || p.rows->listed() || by_slots(p))
        return false;
    const GroupLayout& layout = p.rows->layout;
    const bool straddled = p.a.quantized && scale_shift(*p.a.quantized) != 0 &&
                           layout.spacing % kTile != 0; // groups share scales
    return !straddled && layout.groups <= kMaxGroups && div_up(layout.spacing, kTile) <= kMostTiles;
}

namespace {

/// [groups * rows, columns] as [groups, rows, columns].
TensorView as_batch(const TensorView& view, std::uint64_t groups) {
    TensorView result = view;
    const std::uint64_t rows = view.extent[0] / groups;
    result.rank = 3;
    result.extent = {groups, rows, view.extent[1]};
    result.stride = {rows * view.stride[0], view.stride[0], view.stride[1]};
    return result;
}

Quantized as_batch(const Quantized& q, std::uint64_t groups) {
    Quantized result = q;
    result.codes = as_batch(q.codes, groups);
    result.scales = as_batch(q.scales, groups);
    return result;
}

} // namespace

void record_packed(Recording& recording, const char* op, const Product& p, const Tile& tile,
                   BufferView workspace) {
    const Operands operands(op);
    if (p.d.num_elements() == 0)
        return;
    const Device& device = recording.device();
    const GroupLayout* counted = packed_reads_layout(p) ? &p.rows->layout : nullptr;
    const TensorView d_view = counted ? as_batch(p.d, counted->groups) : p.d;
    const Extents d = extents_of(d_view);
    const bool tn = p.form == GemmForm::TN, grouped = p.rows != nullptr;
    const GroupedRows* rows = grouped && !tn && counted == nullptr ? p.rows : nullptr;
    const GroupLayout* sums = grouped && tn ? &p.rows->layout : nullptr;
    Cut whole = cut_for(device, p).value();
    if (tile != Tile{})
        whole.tile = tile;
    const MatrixUnits& units = whole.units;
    const Tile& cut = whole.tile;
    const Quantized a_codes = counted ? as_batch(*p.a.quantized, counted->groups) : *p.a.quantized;
    const BufferView counts = counted ? counted->values.buffer : BufferView{};
    const Source of_a{a_codes, Side::A, tn, rows, sums, counts};
    const Source of_b{*p.b.quantized, Side::B, p.form != GemmForm::NT, nullptr, sums};
    BufferView memory = packed_ahead(p.b) ? p.b.prepacked->memory : workspace;
    const Packed b = place(units, of_b, memory);
    if (packed_ahead(p.b))
        memory = workspace;
    else
        pack(recording, operands, units, of_b, b);
    const Packed a = place(units, of_a, memory);
    pack(recording, operands, units, of_a, a);

    const bool d_by_slot = rows != nullptr && rows->d_by_slot;
    const bool bf16 = p.d.dtype == DType::BF16;
    const Destination to = operands.destination(d_view);
    using K = kernels::Fp8PackedGemm;
    const BufferView nothing = a.image;
    const K kernel{
        .variant = bf16 ? K::Variant::f16_bf16 : K::Variant::f16_f32,
        .constants = {.local_size = units.subgroup * cut.warps_m * cut.warps_n * cut.warps_k,
                      .subgroup = units.subgroup,
                      .mma_m = units.shape.m,
                      .mma_n = units.shape.n,
                      .mma_k = units.shape.k,
                      .fragments_m = cut.fragments_m,
                      .fragments_n = cut.fragments_n,
                      .warps_m = cut.warps_m,
                      .warps_n = cut.warps_n,
                      .warps_k = cut.warps_k,
                      .together = whole.together(),
                      .wide = whole.wide(),
                      .b_ahead = cut.ahead,
                      .b_slots = units.b_slots,
                      .b_slot = units.b_slot,
                      .own_scales = own_scales(*p.b.quantized) ? 1u : 0u,
                      .by_sum = sums != nullptr ? 1u : 0u,
                      .by_rows = tn ? 0u : 1u,
                      .d_by_slot = d_by_slot ? 1u : 0u,
                      .aligned = to.aligned ? 1u : 0u,
                      // lavapipe compiles long loops for a minute
                      .at_once = device.info().is_cpu ? 1u : 4u},
        .tiles = rows != nullptr ? rows->tiles.tiles : nothing,
        .begins = sums != nullptr ? p.rows->tiles.rows.begins.buffer : nothing,
        .ends = counted   ? counts
                : grouped ? p.rows->tiles.rows.ends.buffer
                          : nothing,
        .a_image = a.image,
        .a_scales = a.scales,
        .a_peaks = a.peaks,
        .a_spread = a.spread,
        .b_image = b.image,
        .b_factors = b.factors,
        .b_scales = b.scales,
        .b_peaks = b.peaks,
        .b_spread = b.spread,
        .slots = d_by_slot ? rows->slots.buffer : nothing,
        .d = p.d.buffer,
        .m = operands.u32("M", d.rows),
        .n = operands.u32("N", d.columns),
        .blocks = operands.u32("blocks", a.blocks),
        .ldd = to.ld,
        .stride_d = to.batch,
        .rows_from = static_cast<std::uint32_t>(of_a.rows_from()),
        .accumulate = p.accumulate ? 1u : 0u};
    const std::uint64_t n_tiles = div_up(d.columns, kTile);
    if (rows == nullptr) {
        recording.dispatch(kernel,
                           {operands.u32("tiles", div_up(d.rows, kTile)),
                            operands.grid("tiles", n_tiles), operands.grid("groups", d.batch)});
        return;
    }
    const BufferView grid = rows->tiles.grid(d.columns, true);
    operands.require(static_cast<bool>(grid),
                     "the work list was not made for N = " + std::to_string(d.columns));
    recording.dispatch_indirect(kernel, grid);
}

} // namespace bellows::fp8
