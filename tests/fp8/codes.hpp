// SPDX-License-Identifier: MIT
#pragma once

// Values at which FP8 conversion can go wrong.

#include "verify/reference/fp8.hpp"

#include <bellows/fp8/format.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace bellows::test {

inline reference::Fp8Format reference_format(fp8::Format format) {
    return format == fp8::Format::E4M3 ? reference::Fp8Format::E4M3 : reference::Fp8Format::E5M2;
}

inline constexpr fp8::Format kFormats[] = {fp8::Format::E4M3, fp8::Format::E5M2};

/// Every value and every midpoint of neighbouring values, each with its four neighbours in f32;
/// beyond the largest value; zeros, f32 subnormals, infinities, NaNs; a spread over all bits.
inline std::vector<float> critical_values(fp8::Format format) {
    std::vector<float> values;
    const auto add_around = [&](double centre) {
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(centre));
        for (std::uint32_t offset = 0; offset <= 4; ++offset)
            for (const std::uint32_t sign : {0u, 0x80000000u})
                if (bits + offset >= 2)
                    values.push_back(std::bit_cast<float>((bits + offset - 2) | sign));
    };
    const auto reference = reference_format(format);
    for (int code = 0; code < 0x7F; ++code) {
        const double low = reference::fp8_value(reference, static_cast<std::uint8_t>(code));
        const double high = reference::fp8_value(reference, static_cast<std::uint8_t>(code + 1));
        if (!std::isfinite(low))
            continue;
        add_around(low);
        if (std::isfinite(high))
            add_around((low + high) / 2);
    }
    for (const double beyond : {464.0, 480.0, 61440.0, 65536.0, 3.0e38})
        add_around(beyond);
    for (const std::uint32_t bits : {0u, 1u, 2u, 0x007FFFFFu, 0x00400000u, 0x00800000u, 0x7F7FFFFFu,
                                     0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu})
        for (const std::uint32_t sign : {0u, 0x80000000u})
            values.push_back(std::bit_cast<float>(bits | sign));
    for (std::uint32_t bits = 0; bits < 0xFFFF0000u; bits += 40009u)
        values.push_back(std::bit_cast<float>(bits));
    while (values.size() % 4 != 0)
        values.push_back(0);
    return values;
}

/// Largest magnitudes of blocks at which a scale's rounding turns, and both ends of the range.
inline std::vector<float> critical_maxima() {
    std::vector<float> values = {0,
                                 -0.0f,
                                 1e-4f,
                                 std::nextafter(1e-4f, 0.0f),
                                 std::nextafter(1e-4f, 1.0f),
                                 std::numeric_limits<float>::max(),
                                 std::numeric_limits<float>::infinity(),
                                 std::numeric_limits<float>::denorm_min(),
                                 std::nanf("")};
    for (int exponent = -20; exponent <= 127; ++exponent)
        for (const double mantissa : {1.0, 1.25, 1.5, 1.75, 1.99}) {
            const auto bits =
                std::bit_cast<std::uint32_t>(static_cast<float>(std::ldexp(mantissa, exponent)));
            for (std::uint32_t offset = 0; offset < 3; ++offset)
                values.push_back(std::bit_cast<float>(bits + offset - 1));
        }
    return values;
}

} // namespace bellows::test
