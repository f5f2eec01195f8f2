// SPDX-License-Identifier: MIT
#pragma once

// How the kernels of products on matrix units get a tile and the registers of matrices: constants
// that all of them name alike.

#include <bellows/engine/matrix_images.hpp>
#include <bellows/fp8/gemm.hpp>

#include <cstdint>

namespace bellows::fp8 {

template <class Constants>
void set_tile(Constants& c, std::uint32_t subgroup_size, const MatrixShape& shape, const Tile& t) {
    c.local_size = subgroup_size * t.warps_m * t.warps_n * t.warps_k;
    c.mma_m = shape.m;
    c.mma_n = shape.n;
    c.mma_k = shape.k;
    c.fragments_m = t.fragments_m;
    c.fragments_n = t.fragments_n;
}

/// A kernel's constants of the slots of one operand's matrices.
template <class Constants>
struct SlotConstants {
    std::uint32_t Constants::* place;
    std::uint32_t Constants::* slot;
    std::uint32_t Constants::* lane;
    std::uint32_t Constants::* chunk;
};

template <class Constants>
void set_slots(Constants& c, const MatrixSlots& slots, const SlotConstants<Constants>& of_a,
               const SlotConstants<Constants>& of_b) {
    const auto set = [&](const SlotConstants<Constants>& to, const MatrixSlots::Operand& from) {
        c.*to.place = from.place;
        c.*to.slot = from.slot;
        c.*to.lane = from.lane;
        c.*to.chunk = from.chunk;
    };
    c.per_k = slots.per_k;
    set(of_a, slots.a);
    set(of_b, slots.b);
}

} // namespace bellows::fp8
