// SPDX-License-Identifier: MIT
#pragma once

// Which variant of a kernel moves memory (shaders/include/words64.glsl). For the ops, the FP8
// kernels and the exchange that launch such kernels.

#include <bellows/engine/device.hpp>

#include <cstdint>

namespace bellows {

/// Whether a variant with WORDS64 serves: on CPU drivers with integers of 64 bits.
template <class K>
bool serves_words64(const Device& device, typename K::Variant variant) {
    return device.info().is_cpu &&
           device.why_not(K::info(), static_cast<std::uint32_t>(variant)).empty();
}

/// K::Variant::f32, or bf16; in its place bf16_words64, where K has that and it serves: the same
/// bits.
template <class K>
typename K::Variant row_variant(const Device& device, bool bf16) {
    using Variant = typename K::Variant;
    if constexpr (requires { Variant::bf16_words64; })
        if (bf16 && serves_words64<K>(device, Variant::bf16_words64))
            return Variant::bf16_words64;
    return bf16 ? Variant::bf16 : Variant::f32;
}

} // namespace bellows
