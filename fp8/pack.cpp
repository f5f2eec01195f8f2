// SPDX-License-Identifier: MIT
#include "pack.hpp"

#include <bellows/engine/matrix_images.hpp>
#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kTile = 128; // along m, n and the sum
constexpr std::uint64_t kLocalSize = 128;
constexpr std::uint64_t kVectorBytes = kTile * 4;
constexpr std::uint64_t kMostFactorBytes = kTile * 32 * 2; // of a block: 32 is the deepest matrix

constexpr std::uint64_t kBlocksAtOnce = 4; // of shaders/fp8_pack_rows.comp
constexpr std::uint32_t kSpreadRows = 32;  // of A's rows with a spread of their own
constexpr std::uint64_t kSpreads = kTile / kSpreadRows;

struct Counts {
    std::uint64_t batch_tiles, tiles, blocks, units;
};

Counts counts_of(const Source& s) {
    const Extents e = extents_of(s.q.codes);
    const std::uint64_t x = s.by_k ? e.columns : e.rows, k = s.by_k ? e.rows : e.columns;
    Counts c{div_up(x, kTile), 0, div_up(k, kTile), 0};
    c.tiles = s.rows == nullptr ? e.batch * c.batch_tiles : s.rows->tiles.capacity();
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

} // namespace

std::optional<MatrixUnits> units_for_images(const Device& device) {
    const std::uint32_t size = device.info().subgroup_size;
    const auto units_of = [&](const MatrixShape& shape) {
        MatrixUnits units{shape, size, shape.n * shape.k / size};
        if (const auto slots = matrix_slots(device, shape)) {
            units.b_slots /= slots->per_k;
            for (std::uint32_t bit = 0; bit < 32; bit += 4)
                units.b_slot |= (slots->b.place >> bit & 15) / slots->per_k << bit;
        }
        return units;
    };
    for (const GemmClass& c : gemm_classes(device))
        if (c.units == GemmClass::Units::F16 && c.why_not.empty() && size != 0 &&
            kLocalSize % size == 0 && 32 % c.shape.k == 0 && 32 % c.shape.m == 0 &&
            32 % c.shape.n == 0)
            return units_of(c.shape);
    return std::nullopt;
}

bool own_scales(const Quantized& q) {
    return q.recipe.blocks != Blocks::Blocks128;
}

std::uint64_t packed_bytes(const Quantized& q, Side side, std::uint64_t groups) {
    const Extents e = extents_of(q.codes);
    const std::uint64_t down = div_up(e.rows, kTile), across = div_up(e.columns, kTile);
    const std::uint64_t places = (e.batch * down + groups) * across;
    const std::uint64_t factors = side == Side::B && own_scales(q) ? kMostFactorBytes : 0;
    return places * (block_bytes(side) + kVectorBytes + factors) +
           (e.batch * down + groups + groups * across + across) * (kVectorBytes + 4 * kSpreads) +
           512;
}

std::uint64_t prepacked_bytes(const Quantized& b) {
    const Extents e = extents_of(b.codes);
    const std::uint64_t down = div_up(e.rows, kTile), across = div_up(e.columns, kTile);
    const std::uint64_t factors = own_scales(b) ? kMostFactorBytes : 0;
    const std::uint64_t vectors = kVectorBytes + 4 * kSpreads; // of a tile
    return e.batch * (down * across * (block_bytes(Side::B) + kVectorBytes + factors) +
                      std::max(down, across) * vectors) +
           256;
}

namespace {

/// Of a tile's block; 0 where a block of B has one scale.
std::uint64_t factor_bytes(const MatrixUnits& units, const Source& source) {
    return source.side == Side::B && own_scales(source.q)
               ? (kTile / units.shape.n) * div_up(units.b_slots, 2) * units.subgroup * 4
               : 0;
}

} // namespace

Packed place(const MatrixUnits& units, const Source& source, BufferView& memory) {
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
    if (const std::uint64_t bytes = factor_bytes(units, source); bytes != 0)
        packed.factors = take(c.tiles * c.blocks * bytes);
    packed.scales = take(c.tiles * c.blocks * kVectorBytes);
    packed.peaks = take(c.units * kVectorBytes);
    packed.spread = take(round_up(4 * kSpreads * c.units, 256));
    return packed;
}

Packed entries(const MatrixUnits& units, const Source& source, const Packed& packed,
               std::uint64_t first, std::uint64_t count) {
    const std::uint64_t tiles = counts_of(source).batch_tiles;
    const auto part = [&](const BufferView& view, std::uint64_t of_tile) {
        return view.sub(first * tiles * of_tile, count * tiles * of_tile);
    };
    Packed some = packed;
    some.image = part(packed.image, packed.blocks * block_bytes(source.side));
    some.factors = some.image;
    if (const std::uint64_t bytes = factor_bytes(units, source); bytes != 0)
        some.factors = part(packed.factors, packed.blocks * bytes);
    some.scales = part(packed.scales, packed.blocks * kVectorBytes);
    some.peaks = part(packed.peaks, kVectorBytes);
    some.spread = part(packed.spread, 4);
    return some;
}

namespace {

/// What is packed, as both ways of packing take it.
struct Packing {
    const Source& source;
    const Packed& packed;
    Counts counts;
    Extents extents;
    Matrix codes;
    Scales scales;
    std::uint32_t extent, batch_tiles, k, blocks;

    Packing(const Operands& operands, const Source& from, const Packed& to)
        : source(from), packed(to), counts(counts_of(from)), extents(extents_of(from.q.codes)),
          codes(operands.codes("codes", from.q, true)),
          scales(operands.scales("scales", from.q, codes)),
          extent(operands.u32("rows", from.by_k ? extents.columns : extents.rows)),
          batch_tiles(operands.u32("tiles", counts.batch_tiles)),
          k(operands.u32("k", from.by_k ? extents.rows : extents.columns)),
          blocks(operands.u32("blocks", counts.blocks)) {
        operands.u32("sixteens of packed bytes",
                     counts.tiles * counts.blocks * block_bytes(from.side) / 16);
        operands.u32("the number of words of codes", codes.memory.bytes / 4);
    }
};

/// Of A whose sum runs along its rows.
void pack_rows(Recording& recording, const Operands& operands, const MatrixUnits& units,
               const Packing& p) {
    const GroupedRows* rows = p.source.rows;
    const BufferView nothing = p.codes.memory;
    const bool by_slots = rows != nullptr && rows->slots_per_a_row != 0;
    recording.dispatch(
        kernels::Fp8PackRows{.constants = {.local_size = kLocalSize,
                                           .subgroup = units.subgroup,
                                           .mma_m = units.shape.m,
                                           .mma_k = units.shape.k},
                             .tile_count =
                                 rows != nullptr ? rows->tiles.arguments.sub(0, 4) : nothing,
                             .list = rows != nullptr ? rows->tiles.tiles : nothing,
                             .ends = rows != nullptr   ? rows->tiles.rows.ends.buffer
                                     : p.source.counts ? p.source.counts
                                                       : nothing,
                             .slots = by_slots ? rows->slots.buffer : nothing,
                             .source = p.codes.memory,
                             .source_scales = p.scales.memory,
                             .peaks = p.packed.peaks,
                             .spread = p.packed.spread,
                             .scales = p.packed.scales,
                             .image = p.packed.image,
                             .rows_from = static_cast<std::uint32_t>(p.source.rows_from()),
                             .slots_per_row = by_slots ? rows->slots_per_a_row : 0u,
                             .extent = p.extent,
                             .batch_tiles = p.batch_tiles,
                             .batch_stride16 = p.codes.batch8 / 2,
                             .batch_stride = p.scales.batch,
                             .ld16 = p.codes.stride8 / 2,
                             .stride_x = p.scales.stride,
                             .x_shift = scale_shift(p.source.q),
                             .k = p.k,
                             .blocks = p.blocks},
        {operands.u32("blocks", div_up(p.counts.blocks, kBlocksAtOnce)),
         operands.grid("tiles", p.counts.tiles), static_cast<std::uint32_t>(kSpreads)});
}

/// Of the others: first scales, then codes.
void pack_tiles(Recording& recording, const Operands& operands, const MatrixUnits& units,
                const Packing& p) {
    const Source& source = p.source;
    const Packed& packed = p.packed;
    const BufferView nothing = p.codes.memory;
    const BufferView offsets = source.sums ? source.sums->values.buffer : nothing;
    const std::uint32_t groups = source.sums ? operands.u32("groups", source.sums->groups) : 0;
    const std::uint32_t by_k = source.by_k ? 1 : 0;
    recording.dispatch(kernels::Fp8PackScales{.constants = {.by_k = by_k},
                                              .group_offsets = offsets,
                                              .source = p.scales.memory,
                                              .codes = p.codes.memory,
                                              .scales = packed.scales,
                                              .peaks = packed.peaks,
                                              .spread = packed.spread,
                                              .extent = p.extent,
                                              .batch_tiles = p.batch_tiles,
                                              .batch_stride = p.scales.batch,
                                              .blocks = p.blocks,
                                              .groups = groups,
                                              .x_shift = scale_shift(p.source.q),
                                              .stride_x = source.by_k ? 1u : p.scales.stride,
                                              .stride_block = source.by_k ? p.scales.stride : 1u,
                                              .batch_stride16 = p.codes.batch8 / 2,
                                              .ld16 = p.codes.stride8 / 2,
                                              .k = p.k},
                       {operands.u32("tiles", p.counts.tiles), 1, std::max(groups, 1u)});
    using K = kernels::Fp8PackOperand;
    recording.dispatch(K{.variant = source.side == Side::A ? K::Variant::a : K::Variant::b,
                         .constants = {.local_size = kLocalSize,
                                       .subgroup = units.subgroup,
                                       .mma_m = units.shape.m,
                                       .mma_n = units.shape.n,
                                       .mma_k = units.shape.k,
                                       .by_k = by_k,
                                       .b_slots = units.b_slots,
                                       .b_slot = units.b_slot,
                                       .own_scales = own_scales(source.q) ? 1u : 0u},
                         .group_offsets = offsets,
                         .source = p.codes.memory,
                         .peaks = packed.peaks,
                         .spread = packed.spread,
                         .scales = packed.scales,
                         .image = packed.image,
                         .factors = packed.factors,
                         .extent = p.extent,
                         .batch_tiles = p.batch_tiles,
                         .batch_stride16 = p.codes.batch8 / 2,
                         .ld16 = p.codes.stride8 / 2,
                         .k = p.k,
                         .groups = groups},
                       {p.blocks, operands.grid("tiles", p.counts.tiles), 1});
}

} // namespace

void pack(Recording& recording, const Operands& operands, const MatrixUnits& units,
          const Source& source, const Packed& packed) {
    const Packing p(operands, source, packed);
    if (source.side == Side::A && !source.by_k)
        pack_rows(recording, operands, units, p);
    else
        pack_tiles(recording, operands, units, p);
}

} // namespace bellows::fp8
