// SPDX-License-Identifier: MIT
#include "verify/reference/fp8.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace bellows::reference {

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A product or a sum of two f32 values is exact in f64 where it is used here, so that one rounding
/// is left.
float rounded(double value) {
    return static_cast<float>(value);
}

std::array<double, 128> positive_values(Fp8Format format) {
    std::array<double, 128> values{};
    for (std::uint8_t code = 0; code < 128; ++code)
        values[code] = fp8_value(format, code);
    return values;
}

} // namespace

double fp8_value(Fp8Format format, std::uint8_t code) {
    const bool e4m3 = format == Fp8Format::E4M3;
    const int bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
    const int mantissa = code % (1 << bits), exponent = code % 128 / (1 << bits);
    const double sign = code >= 128 ? -1 : 1;
    if (e4m3 && exponent == 15 && mantissa == 7)
        return kNan;
    if (!e4m3 && exponent == 31)
        return mantissa == 0 ? sign * std::numeric_limits<double>::infinity() : kNan;
    const double fraction = static_cast<double>(mantissa) / (1 << bits);
    return sign * (exponent == 0 ? std::ldexp(fraction, 1 - bias)
                                 : std::ldexp(1 + fraction, exponent - bias));
}

std::uint8_t fp8_nearest(Fp8Format format, double x) {
    if (std::isnan(x))
        return 0x7F;
    const double largest = format == Fp8Format::E4M3 ? 448 : 57344;
    const double magnitude = std::min(std::abs(x), largest);
    static const auto all = {positive_values(Fp8Format::E4M3), positive_values(Fp8Format::E5M2)};
    const auto& values = all.begin()[format == Fp8Format::E4M3 ? 0 : 1];
    std::uint8_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (std::uint8_t code = 0; code < 128; ++code) {
        const double error = std::abs(values[code] - magnitude);
        if (error < least || (error == least && code % 2 == 0)) {
            least = error;
            best = code;
        }
    }
    return static_cast<std::uint8_t>(best + (std::signbit(x) ? 128 : 0));
}

float fp8_block_scale(Fp8Format format, Fp8Rule rule, float amax) {
    const bool e4m3 = format == Fp8Format::E4M3;
    if (std::isnan(amax))
        return std::numeric_limits<float>::quiet_NaN();
    const float limited = std::clamp(amax, 1e-4f, std::numeric_limits<float>::max());
    const double largest = e4m3 ? 448 : 57344;
    if (rule == Fp8Rule::F32)
        return rounded(static_cast<double>(limited) * rounded(1 / largest));
    int exponent = -117;
    while (exponent < (e4m3 ? 119 : 112) && std::ldexp(largest, exponent) < limited)
        ++exponent;
    return rounded(std::ldexp(1, exponent));
}

float fp8_inverse_scale(Fp8Rule rule, float scale) {
    if (std::isnan(scale))
        return scale;
    if (rule == Fp8Rule::PowerOfTwo)
        return rounded(1 / static_cast<double>(scale));
    // The first guess subtracts bit patterns: the exponent negated, a line through the mantissa.
    int exponent = 0;
    const double mantissa = 2 * std::frexp(static_cast<double>(scale), &exponent); // [1, 2)
    const auto low = static_cast<std::int64_t>((mantissa - 1) * 0x1p23);
    const std::int64_t bits = 0x7EF311C7 - (((exponent - 1 + 127LL) << 23) + low);
    const double guess = std::ldexp(1 + static_cast<double>(bits % (1 << 23)) * 0x1p-23,
                                    static_cast<int>(bits >> 23) - 127);
    float inverse = rounded(guess);
    for (int i = 0; i < 4; ++i) {
        const float product = rounded(static_cast<double>(scale) * inverse);
        const float correction = rounded(2.0 - product);
        inverse = rounded(static_cast<double>(inverse) * correction);
    }
    return inverse;
}

float fp8_quantize_block(const std::vector<float>& x, std::uint64_t columns, const Fp8Block& block,
                         Fp8Format format, Fp8Rule rule, std::vector<std::uint8_t>& codes) {
    float amax = 0;
    const auto each = [&](auto&& visit) {
        for (std::uint64_t row = block.row; row < block.row_end; ++row)
            for (std::uint64_t column = block.column; column < block.column_end; ++column)
                visit(row * columns + column);
    };
    each([&](std::uint64_t i) {
        if (std::isnan(x[i]) || std::isnan(amax))
            amax = std::numeric_limits<float>::quiet_NaN();
        else
            amax = std::max(amax, std::abs(x[i]));
    });
    const float scale = fp8_block_scale(format, rule, amax);
    const float inverse = fp8_inverse_scale(rule, scale);
    each([&](std::uint64_t i) {
        codes[i] = fp8_nearest(format, rounded(static_cast<double>(x[i]) * inverse));
    });
    return scale;
}

} // namespace bellows::reference
