// SPDX-License-Identifier: MIT
#pragma once

// Which variant of a kernel moves rows, of f32 or bf16 (shaders/include/words64.glsl). For the ops,
// the FP8 kernels and the exchange that launch such kernels.

#include <bellows/engine/device.hpp>

#include <cstdint>

namespace bellows {

/// K::Variant::f32, or bf16; in its place bf16_words64, where K has that, on CPU drivers with
/// integers of 64 bits: the same bits.
template <class K>
typename K::Variant row_variant(const Device& device, bool bf16) {
    using Variant = typename K::Variant;
    if constexpr (requires { Variant::bf16_words64; }) {
        const auto wide = static_cast<std::uint32_t>(Variant::bf16_words64);
        if (bf16 && device.info().is_cpu && device.why_not(K::info(), wide).empty())
            return Variant::bf16_words64;
    }
    return bf16 ? Variant::bf16 : Variant::f32;
}

} // namespace bellows
