// SPDX-License-Identifier: MIT
#pragma once

// The 8-bit floating-point formats and their conversion on the host. shaders/include/fp8.glsl gives
// the same bits on a device. Plain values, any thread.
//
//           bias  largest         least normal  least subnormal  infinity  NaN
//   E4M3    7     448 (0x7E)      2^-6          2^-9             none      0x7F, 0xFF
//   E5M2    15    57344 (0x7B)    2^-14         2^-16            0x7C      0x7D..0x7F
//   UE8M0   127   2^127 (0xFE)    2^-127 (0x00) none             none      0xFF
// E4M3 and E5M2 as in "FP8 formats for deep learning" (Micikevicius et al., 2022) and the OCP
// specification; UE8M0 as the scales of the OCP microscaling formats.

#include <bellows/base/dtype.hpp>

#include <cstdint>

namespace bellows::fp8 {

enum class Format : std::uint8_t { E4M3, E5M2 };

const char* to_string(Format format) noexcept;

constexpr DType dtype_of(Format format) noexcept {
    return format == Format::E4M3 ? DType::F8E4M3 : DType::F8E5M2;
}
constexpr float largest(Format format) noexcept {
    return format == Format::E4M3 ? 448.0f : 57344.0f;
}

/// What every NaN is encoded as.
inline constexpr std::uint8_t kNanCode = 0x7F;

/// Exact.
float decode(Format format, std::uint8_t code) noexcept;
/// The nearest code, ties to even; beyond the largest value, infinities included, the largest of
/// that sign (no infinity is ever made); NaN gives kNanCode. The sign of zero is kept.
std::uint8_t encode(Format format, float value) noexcept;

/// 2^(code - 127); 0xFF: NaN. 2^-127 is an f32 subnormal, which devices may take for 0.
float decode_ue8m0(std::uint8_t code) noexcept;
/// The least power of two >= value, 0x00 for what is below 2^-127; infinity gives 0xFE, NaN 0xFF.
/// value has no sign.
std::uint8_t encode_ue8m0(float value) noexcept;

} // namespace bellows::fp8
