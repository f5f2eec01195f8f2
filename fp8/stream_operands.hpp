// SPDX-License-Identifier: MIT
#pragma once

// Which operands the kernels of streamed products take, and how they get them: the same names and
// strides in all of them.

#include "operands.hpp"
#include "slots.hpp"
#include "tiles.hpp"

#include <bellows/engine/gemm_plan.hpp>

#include <initializer_list>
#include <string>
#include <vector>

namespace bellows::fp8 {

/// "" when kernel K, which multiplies on matrix units of f16, takes the product's operands on this
/// device, else what is against it. tile: the one that is named.
template <class K>
std::string why_not_on_units(const Device& device, const Product& p, const Tile& tile) {
    if (device.info().is_cpu && tile == Tile{})
        return "a CPU's matrices are slower than its f32 arithmetic";
    std::string lacking =
        device.why_not(K::info(), static_cast<std::uint32_t>(K::Variant::f16_f32));
    if (!lacking.empty())
        return lacking;
    for (const Operand* o : {&p.a, &p.b})
        if (!o->quantized || o->quantized->recipe.rule != ScaleRule::PowerOfTwo)
            return "matrix units take e4m3 operands with power-of-two scales";
    if (p.b.quantized->recipe.blocks != Blocks::Blocks128)
        return "matrix units take weights in 128x128 blocks";
    return "";
}

/// What is against matrix units where no cut fits.
inline std::string no_cut(const Tile& tile) {
    return tile == Tile{} ? "the device has no subgroup matrices of f16 that fit" : kNoSuchTile;
}

/// The tile of `usual` and those that `changes` make of it, where they fit.
template <class Cut>
std::vector<NamedTile> changed_tiles(const DeviceInfo& info, const Cut& usual,
                                     std::initializer_list<void (*)(Tile&)> changes) {
    const auto name = [](const Cut& c) { return name_of(c.tile, c.rows(), c.columns()); };
    TileList list(usual.tile, name(usual));
    for (const auto change : changes) {
        Cut cut = usual;
        change(cut.tile);
        if (fits(info, cut) && registers(info, cut) <= kMostRegisters)
            list.add(cut.tile, name(cut));
    }
    return list.take();
}

/// Codes and scales of a quantised operand.
struct StreamSource {
    const Matrix codes;
    const Scales scales;

    StreamSource(const Operands& operands, const char* name, const Quantized& q)
        : codes(operands.codes((std::string(name) + "'s codes").c_str(), q, true)),
          scales(operands.scales((std::string(name) + "'s scales").c_str(), q, codes)) {
        operands.u32(("the number of words of a matrix of " + std::string(name)).c_str(),
                     2 * codes.rows * codes.stride8);
    }
};

/// A kernel's fields of a quantised A.
template <class K>
struct StreamA {
    BufferView K::* codes;
    std::uint32_t K::* ld;
    std::uint32_t K::* batch;
};

template <class K>
void bind_a(K& kernel, const Operands& operands, const Quantized& q, const StreamA<K>& to) {
    const StreamSource a(operands, "a", q);
    kernel.*to.codes = a.codes.memory;
    kernel.*to.ld = a.codes.stride8 / 2;
    kernel.*to.batch = a.codes.batch8 / 2;
    kernel.a_scales = a.scales.memory;
    kernel.a_scale_ld = a.scales.stride;
    kernel.a_scale_batch = a.scales.batch;
    kernel.a_shift = scale_shift(q);
}

/// B, D, their sizes and the slots.
template <class K>
void bind_others(K& kernel, const Operands& operands, const Product& p) {
    const Extents d = extents_of(p.d);
    const StreamSource b(operands, "b", *p.b.quantized);
    kernel.b_codes = b.codes.memory;
    kernel.b_scales = b.scales.memory;
    kernel.d = p.d.buffer;
    kernel.m = operands.u32("M", d.rows);
    kernel.n = operands.u32("N", d.columns);
    kernel.k = operands.u32("K", extents_of(p.a.values).columns);
    kernel.ldb16 = b.codes.stride8 / 2;
    kernel.b_batch16 = b.codes.batch8 / 2;
    kernel.b_scale_ld = b.scales.stride;
    kernel.b_scale_batch = b.scales.batch;
    const Destination to = operands.destination(p.d);
    kernel.ldd = to.ld;
    kernel.stride_d = to.batch;
    kernel.constants.aligned = to.aligned ? 1 : 0;
    kernel.accumulate = p.accumulate ? 1 : 0;
    kernel.slots = b.codes.memory;
    if (by_slots(p)) {
        if (p.rows->slots.buffer)
            kernel.slots = p.rows->slots.buffer;
        kernel.slots_per_a_row = p.rows->slots_per_a_row;
        kernel.constants.a_by_slot = p.rows->slots_per_a_row != 0 ? 1 : 0;
        kernel.constants.d_by_slot = p.rows->d_by_slot ? 1 : 0;
    }
}

} // namespace bellows::fp8
