// SPDX-License-Identifier: MIT
#include <bellows/fp8/format.hpp>

#include <algorithm>
#include <bit>

namespace bellows::fp8 {

namespace {

constexpr std::uint32_t kInfinity = 0x7F800000u;
constexpr std::uint32_t kNan = 0x7FC00000u;

struct Layout {
    std::uint32_t mantissa_bits; ///< without the hidden one
    std::uint32_t first_normal;  ///< f32 bits of the least normal value
    std::uint32_t largest;       ///< f32 bits of the largest value
};

constexpr Layout layout_of(Format format) noexcept {
    return format == Format::E4M3 ? Layout{3, 0x3C800000u, 0x43E00000u}
                                  : Layout{2, 0x38800000u, 0x47600000u};
}

/// value / 2^bits, ties to even.
constexpr std::uint32_t shift_to_nearest(std::uint32_t value, std::uint32_t bits) noexcept {
    return (value + (1u << (bits - 1)) - 1u + ((value >> bits) & 1u)) >> bits;
}

} // namespace

const char* to_string(Format format) noexcept {
    return format == Format::E4M3 ? "e4m3" : "e5m2";
}

float decode(Format format, std::uint8_t code) noexcept {
    const Layout layout = layout_of(format);
    const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
    const std::uint32_t magnitude = code & 0x7Fu;
    const std::uint32_t shift = 23 - layout.mantissa_bits, hidden = 1u << layout.mantissa_bits;
    std::uint32_t bits = layout.first_normal + ((magnitude - hidden) << shift);
    if (magnitude < hidden) {
        // magnitude * 2^(exponent of the least normal - mantissa bits), normal in f32 or zero
        const auto width = static_cast<std::uint32_t>(std::bit_width(magnitude));
        bits = magnitude == 0 ? 0
                              : layout.first_normal - ((layout.mantissa_bits + 1 - width) << 23) +
                                    ((magnitude << (24 - width)) & 0x7FFFFFu);
    } else if (format == Format::E4M3 ? magnitude == 0x7Fu : magnitude > 0x7Cu) {
        bits = kNan;
    } else if (format == Format::E5M2 && magnitude == 0x7Cu) {
        bits = kInfinity;
    }
    return std::bit_cast<float>(sign | bits);
}

std::uint8_t encode(Format format, float value) noexcept {
    const Layout layout = layout_of(format);
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if ((bits & 0x7FFFFFFFu) > kInfinity)
        return kNanCode;
    const std::uint32_t sign = bits >> 24 & 0x80u;
    const std::uint32_t magnitude = std::min(bits & 0x7FFFFFFFu, layout.largest);
    const std::uint32_t shift = 23 - layout.mantissa_bits, hidden = 1u << layout.mantissa_bits;
    if (magnitude >= layout.first_normal)
        return static_cast<std::uint8_t>(
            sign | (shift_to_nearest(magnitude - layout.first_normal, shift) + hidden));
    const std::uint32_t below = (layout.first_normal >> 23) - (magnitude >> 23);
    if (below > layout.mantissa_bits + 1) // less than half of the least subnormal
        return static_cast<std::uint8_t>(sign);
    const std::uint32_t significand = (magnitude & 0x7FFFFFu) | 0x800000u;
    return static_cast<std::uint8_t>(sign | shift_to_nearest(significand, shift + below));
}

float decode_ue8m0(std::uint8_t code) noexcept {
    if (code == 0xFFu)
        return std::bit_cast<float>(kNan);
    return std::bit_cast<float>(code == 0 ? 0x00400000u : static_cast<std::uint32_t>(code) << 23);
}

std::uint8_t encode_ue8m0(float value) noexcept {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(value) & 0x7FFFFFFFu;
    if (bits > kInfinity)
        return 0xFFu;
    if (bits < 0x00800000u)
        return bits > 0x00400000u ? 1 : 0;
    return static_cast<std::uint8_t>(std::min((bits + 0x7FFFFFu) >> 23, 0xFEu));
}

} // namespace bellows::fp8
