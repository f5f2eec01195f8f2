// SPDX-License-Identifier: MIT
#include "pack.hpp"

#include <bellows/kernels/kernels.hpp>

#include <algorithm>

namespace bellows::fp8 {

namespace {

constexpr std::uint64_t kTile = 128; // along m, n and the sum
constexpr std::uint64_t kLocalSize = 128;
constexpr std::uint64_t kVectorBytes = kTile * 4;
constexpr std::uint64_t kMostFactorBytes = kTile * 32 * 2; // of a block: 32 is the deepest matrix

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

} // namespace

std::optional<MatrixUnits> units_for_images(const Device& device) {
    const std::uint32_t size = device.info().subgroup_size;
    for (const GemmClass& c : gemm_classes(device))
        if (c.units == GemmClass::Units::F16 && c.why_not.empty() && size != 0 &&
            kLocalSize % size == 0 && 32 % c.shape.k == 0 && 32 % c.shape.m == 0 &&
            32 % c.shape.n == 0)
            return MatrixUnits{c.shape, size};
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
           (e.batch * down + groups + groups * across + across) * (kVectorBytes + 4) + 512;
}

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
    if (source.side == Side::B && own_scales(source.q))
        packed.factors = take(c.tiles * c.blocks * kTile * units.shape.k * 2);
    packed.scales = take(c.tiles * c.blocks * kVectorBytes);
    packed.peaks = take(c.units * kVectorBytes);
    packed.spread = take(round_up(4 * c.units, 256));
    return packed;
}

void pack(Recording& recording, const Operands& operands, const MatrixUnits& units,
          const Source& source, const Packed& packed) {
    const Counts c = counts_of(source);
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
    const auto k = operands.u32("k", source.by_k ? e.rows : e.columns);
    const std::uint32_t by_k = source.by_k ? 1 : 0;
    recording.dispatch(kernels::Fp8PackScales{.constants = {.by_k = by_k},
                                              .tile_count = count,
                                              .list = list,
                                              .ends = ends,
                                              .group_offsets = offsets,
                                              .source = scales.memory,
                                              .codes = codes.memory,
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
                                              .stride_block = source.by_k ? scales.stride : 1u,
                                              .batch_stride16 = codes.batch8 / 2,
                                              .ld16 = codes.stride8 / 2,
                                              .k = k},
                       {operands.u32("tiles", c.tiles), 1, std::max(groups, 1u)});
    using K = kernels::Fp8PackOperand;
    recording.dispatch(K{.variant = source.side == Side::A ? K::Variant::a : K::Variant::b,
                         .constants = {.local_size = kLocalSize,
                                       .subgroup = units.subgroup,
                                       .mma_m = units.shape.m,
                                       .mma_n = units.shape.n,
                                       .mma_k = units.shape.k,
                                       .by_k = by_k,
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
                         .k = k,
                         .groups = groups},
                       {operands.u32("blocks", c.blocks), operands.grid("tiles", c.tiles), 1});
}

} // namespace bellows::fp8
