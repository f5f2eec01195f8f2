// SPDX-License-Identifier: MIT
#include "packed.hpp"

#include "operands.hpp"

#include <bellows/engine/gemm_plan.hpp>
#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>
#include <optional>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kTile = 128; // along m, n and the sum
constexpr std::uint64_t kLocalSize = 128;
constexpr std::uint64_t kVectorBytes = kTile * 4;
constexpr std::uint64_t kMostFactorBytes = kTile * 32 * 2; // of a block: 32 is the deepest matrix

std::uint64_t groups_of(const Product& p) {
    return p.rows == nullptr ? 0 : p.rows->layout.groups;
}

// --- The kernel's cut

struct Cut {
    MatrixShape shape;
    std::uint32_t subgroup = 0;
    std::uint32_t warps_m = 0, warps_n = 0;
};

std::optional<Cut> cut_for(const Device& device) {
    const std::uint32_t size = device.info().subgroup_size;
    for (const GemmClass& c : gemm_classes(device)) {
        if (c.units != GemmClass::Units::F16 || !c.why_not.empty() || size == 0 ||
            kLocalSize % size != 0)
            continue;
        Cut cut{c.shape, size};
        for (cut.warps_m = cut.warps_n = 1; cut.warps_m * cut.warps_n * size < kLocalSize;)
            (cut.warps_m <= cut.warps_n ? cut.warps_m : cut.warps_n) *= 2;
        if (cut.warps_m * cut.warps_n * size == kLocalSize &&
            kTile % (cut.warps_m * c.shape.m) == 0 && kTile % (cut.warps_n * c.shape.n) == 0 &&
            32 % c.shape.k == 0 && 32 % c.shape.m == 0 && 32 % c.shape.n == 0)
            return cut;
    }
    return std::nullopt;
}

// --- Packing

enum class Side : std::uint8_t { A, B };

/// Where an operand's tiles come from.
struct Source {
    const Quantized& q;
    Side side;
    bool by_k = false;                     ///< memory has k as its rows
    const ops::GroupTiles* list = nullptr; ///< tiles of rows of groups
    const GroupLayout* sums = nullptr;     ///< the sum goes over the rows of these groups
};

struct Packed {
    BufferView image, factors, scales, peaks, spread;
    std::uint64_t blocks = 0;
};

struct Counts {
    std::uint64_t batch_tiles, tiles, blocks, units;
};

Counts counts_of(const Source& s) {
    const Extents e = extents_of(s.q.codes);
    const std::uint64_t x = s.by_k ? e.columns : e.rows, k = s.by_k ? e.rows : e.columns;
    Counts c{div_up(x, kTile), 0, div_up(k, kTile), 0};
    c.tiles = s.list == nullptr ? e.batch * c.batch_tiles : s.list->capacity();
    c.units = c.tiles;
    if (s.sums != nullptr) {
        c.blocks = k / kTile + s.sums->groups;
        c.units = c.tiles * s.sums->groups;
    }
    return c;
}

/// Of A an f16 per code, of B the code.
std::uint64_t block_bytes(Side side) {
    return kTile * kTile * (side == Side::A ? 2 : 1);
}

bool own_scales(const Quantized& q) {
    return q.recipe.blocks != Blocks::Blocks128;
}

/// Takes its memory from the front of `memory`.
Packed pack(Recording& recording, const Operands& operands, const Source& source, const Cut& cut,
            BufferView& memory) {
    const Counts c = counts_of(source);
    const auto take = [&](std::uint64_t bytes) {
        const BufferView part = memory.sub(0, bytes);
        memory = memory.sub(bytes, memory.bytes - bytes);
        return part;
    };
    Packed packed;
    packed.blocks = c.blocks;
    packed.image = take(c.tiles * c.blocks * block_bytes(source.side));
    packed.factors = packed.image;
    if (source.side == Side::B && own_scales(source.q))
        packed.factors = take(c.tiles * c.blocks * kTile * cut.shape.k * 2);
    packed.scales = take(c.tiles * c.blocks * kVectorBytes);
    packed.peaks = take(c.units * kVectorBytes);
    packed.spread = take(round_up(4 * c.units, 256));

    operands.u32("sixteens of packed bytes", c.tiles * c.blocks * block_bytes(source.side) / 16);
    const Extents e = extents_of(source.q.codes);
    const Matrix codes = operands.codes("codes", source.q, true);
    operands.u32("the number of words of codes", codes.memory.bytes / 4);
    const Scales scales = operands.scales("scales", source.q, codes);
    const bool blocks128 = source.q.recipe.blocks == Blocks::Blocks128;
    const BufferView nothing = codes.memory;
    const BufferView count = source.list ? source.list->arguments.sub(0, 4) : nothing;
    const BufferView list = source.list ? source.list->tiles : nothing;
    const BufferView ends = source.list ? source.list->rows.ends.buffer : nothing;
    const BufferView offsets = source.sums ? source.sums->values.buffer : nothing;
    const std::uint32_t groups = source.sums ? operands.u32("groups", source.sums->groups) : 0;
    const auto extent = operands.u32("rows", source.by_k ? e.columns : e.rows);
    const auto batch_tiles = operands.u32("tiles", c.batch_tiles);
    recording.dispatch(kernels::Fp8PackScales{.tile_count = count,
                                              .list = list,
                                              .ends = ends,
                                              .group_offsets = offsets,
                                              .source = scales.memory,
                                              .scales = packed.scales,
                                              .peaks = packed.peaks,
                                              .spread = packed.spread,
                                              .from_list = source.list ? 1u : 0u,
                                              .extent = extent,
                                              .batch_tiles = batch_tiles,
                                              .batch_stride = scales.batch,
                                              .blocks = operands.u32("blocks", c.blocks),
                                              .groups = groups,
                                              .x_shift = blocks128 ? 7u : 0u,
                                              .stride_x = source.by_k ? 1u : scales.stride,
                                              .stride_block = source.by_k ? scales.stride : 1u},
                       {operands.u32("tiles", c.tiles), 1, std::max(groups, 1u)});
    using K = kernels::Fp8PackOperand;
    recording.dispatch(K{.variant = source.side == Side::A ? K::Variant::a : K::Variant::b,
                         .constants = {.local_size = kLocalSize,
                                       .subgroup = cut.subgroup,
                                       .mma_m = cut.shape.m,
                                       .mma_n = cut.shape.n,
                                       .mma_k = cut.shape.k,
                                       .by_k = source.by_k ? 1u : 0u,
                                       .own_scales = own_scales(source.q) ? 1u : 0u},
                         .tile_count = count,
                         .list = list,
                         .ends = ends,
                         .group_offsets = offsets,
                         .source = codes.memory,
                         .peaks = packed.peaks,
                         .spread = packed.spread,
                         .scales = packed.scales,
                         .image = packed.image,
                         .factors = packed.factors,
                         .from_list = source.list ? 1u : 0u,
                         .extent = extent,
                         .batch_tiles = batch_tiles,
                         .batch_stride16 = codes.batch8 / 2,
                         .ld16 = codes.stride8 / 2,
                         .k = operands.u32("k", source.by_k ? e.rows : e.columns),
                         .groups = groups},
                       {operands.u32("blocks", c.blocks), operands.grid("tiles", c.tiles), 1});
    return packed;
}

} // namespace

std::string why_not_packed(const Device& device) {
    using K = kernels::Fp8PackedGemm;
    const std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(K::Variant::f16_f32));
    if (!lacking.empty())
        return lacking;
    const std::optional<Cut> cut = cut_for(device);
    if (!cut)
        return "the device has no subgroup matrices of f16 that tiles of 128 x 128 can be cut into";
    return why_no_matrix_images(device, cut->shape);
}

std::string why_not_packed(const Device& device, const Product& p) {
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
    if (std::string lacking = why_not_packed(device); !lacking.empty())
        return lacking;
    if (p.form != GemmForm::TN && p.rows != nullptr &&
        (p.rows->tiles.tile_rows != kTile || p.rows->tiles.width_on_units * 32 != kTile))
        return "the device's work lists have no tiles of 128 x 128";
    return "";
}

std::string packed_class(const Device& device) {
    const auto cut = cut_for(device);
    return cut ? "packed-f16-k" + std::to_string(cut->shape.k) : "packed-f16";
}

bool better_packed(const Device& device, const Product& p) {
    if (device.info().is_cpu || gemm_class(device).units == GemmClass::Units::None)
        return false;
    // Few rows do not pay for packing the weights.
    const Extents d = extents_of(p.d);
    const std::uint64_t groups = std::max<std::uint64_t>(groups_of(p), 1);
    if (p.form == GemmForm::TN)
        return d.rows >= kTile && d.columns >= kTile;
    const bool counts_are_near =
        p.rows == nullptr || p.rows->layout.form != GroupLayout::Form::Masked;
    return counts_are_near && d.rows >= kTile * groups && d.columns >= kTile;
}

std::uint64_t packed_bytes(const Operand& a, const Operand& b) {
    std::uint64_t groups = std::max<std::uint64_t>(extents_of(b.values).batch, 1);
    for (const Operand* o : {&a, &b})
        if (o->quantized && o->quantized->group_offsets.buffer)
            groups = std::max(groups, o->quantized->group_offsets.extent[0] - 1);
    std::uint64_t bytes = 0;
    for (const Operand* o : {&a, &b}) {
        if (!o->quantized)
            return 0;
        const Side side = o == &a ? Side::A : Side::B;
        const Extents e = extents_of(o->values);
        const std::uint64_t down = div_up(e.rows, kTile), across = div_up(e.columns, kTile);
        const std::uint64_t places = (e.batch * down + groups) * across;
        bytes += places * (block_bytes(side) + kVectorBytes) +
                 (e.batch * down + groups + groups * across + across) * (kVectorBytes + 4) + 512;
        if (side == Side::B && own_scales(*o->quantized))
            bytes += places * kMostFactorBytes;
    }
    return bytes;
}

void record_packed(Recording& recording, const char* op, const Product& p, BufferView workspace) {
    const Operands operands(op);
    const Extents d = extents_of(p.d);
    if (d.batch == 0 || d.rows == 0 || d.columns == 0)
        return;
    const Device& device = recording.device();
    const bool tn = p.form == GemmForm::TN, grouped = p.rows != nullptr;
    const ops::GroupTiles* list = grouped && !tn ? &p.rows->tiles : nullptr;
    const GroupLayout* sums = grouped && tn ? &p.rows->layout : nullptr;
    const Cut cut = cut_for(device).value();
    BufferView memory = workspace;
    const Packed a =
        pack(recording, operands, {*p.a.quantized, Side::A, tn, list, sums}, cut, memory);
    const Packed b =
        pack(recording, operands, {*p.b.quantized, Side::B, p.form != GemmForm::NT, nullptr, sums},
             cut, memory);

    const bool bf16 = p.d.dtype == DType::BF16;
    const std::uint64_t ld = p.d.stride[p.d.rank - 2];
    const std::uint64_t stride_d = p.d.rank == 3 ? p.d.stride[0] : 0;
    const bool aligned = d.columns % 4 == 0 && ld % 4 == 0 && stride_d % 4 == 0 &&
                         p.d.buffer.offset % (4 * size_of(p.d.dtype)) == 0;
    using K = kernels::Fp8PackedGemm;
    const BufferView nothing = a.image;
    const K kernel{.variant = bf16 ? K::Variant::f16_bf16 : K::Variant::f16_f32,
                   .constants = {.local_size = kLocalSize,
                                 .subgroup = cut.subgroup,
                                 .mma_m = cut.shape.m,
                                 .mma_n = cut.shape.n,
                                 .mma_k = cut.shape.k,
                                 .fragments_m = static_cast<std::uint32_t>(
                                     kTile / (cut.warps_m * cut.shape.m)),
                                 .fragments_n = static_cast<std::uint32_t>(
                                     kTile / (cut.warps_n * cut.shape.n)),
                                 .warps_m = cut.warps_m,
                                 .warps_n = cut.warps_n,
                                 .own_scales = own_scales(*p.b.quantized) ? 1u : 0u,
                                 .by_sum = sums != nullptr ? 1u : 0u,
                                 .aligned = aligned ? 1u : 0u,
                                 // lavapipe compiles long loops for a minute
                                 .at_once = device.info().is_cpu ? 1u : 4u},
                   .tiles = list != nullptr ? list->tiles : nothing,
                   .begins = sums != nullptr ? p.rows->tiles.rows.begins.buffer : nothing,
                   .ends = grouped ? p.rows->tiles.rows.ends.buffer : nothing,
                   .a_image = a.image,
                   .a_scales = a.scales,
                   .a_peaks = a.peaks,
                   .a_spread = a.spread,
                   .b_image = b.image,
                   .b_factors = b.factors,
                   .b_scales = b.scales,
                   .b_peaks = b.peaks,
                   .b_spread = b.spread,
                   .d = p.d.buffer,
                   .m = operands.u32("M", d.rows),
                   .n = operands.u32("N", d.columns),
                   .blocks = operands.u32("blocks", a.blocks),
                   .ldd = operands.u32("the stride of d", ld),
                   .stride_d = operands.u32("the stride of d", stride_d),
                   .from_list = list != nullptr ? 1u : 0u,
                   .accumulate = p.accumulate ? 1u : 0u};
    const std::uint64_t n_tiles = div_up(d.columns, kTile);
    if (list == nullptr) {
        recording.dispatch(kernel,
                           {operands.u32("tiles", div_up(d.rows, kTile)),
                            operands.grid("tiles", n_tiles), operands.grid("groups", d.batch)});
        return;
    }
    const BufferView grid = list->grid(d.columns, true);
    operands.require(static_cast<bool>(grid),
                     "the work list was not made for N = " + std::to_string(d.columns));
    recording.dispatch_indirect(kernel, grid);
}

} // namespace bellows::fp8
