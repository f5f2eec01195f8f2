// SPDX-License-Identifier: MIT
#pragma once

// What numeric checks share, tests and `bellows selftest` alike: reproducible operands that are
// exact in their storage type, and a comparison with an f64 reference that names the first wrong
// element. A kernel is right when calc_diff() is small *and* every element lies within its own
// bound: the first alone lets one wrong element pass. Pure functions, any thread.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace bellows::reference {

// --- operands
// -------------------------------------------------------------------------------------

/// The bf16 bits nearest to value, ties to even; NaN stays NaN, overflow becomes infinity.
inline std::uint16_t bf16_bits(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value))
        return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(std::uint16_t bits) {
    return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

inline float round_to_bf16(float value) {
    return from_bf16(bf16_bits(value));
}

/// splitmix64: small, and the same on every machine.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t bits() {
        std::uint64_t x = (state_ += 0x9e3779b97f4a7c15u);
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
    /// In [0, 1), 53 bits.
    double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    double uniform(double low, double high) { return low + (high - low) * unit(); }
    /// In [0, count); the bias of the remainder does not matter to tests.
    std::uint64_t below(std::uint64_t count) { return bits() % count; }

private:
    std::uint64_t state_;
};

/// count uniform values of [low, high], each exact in f32.
inline std::vector<float> random_f32(std::size_t count, std::uint64_t seed, double low = -1,
                                     double high = 1) {
    Random random(seed);
    std::vector<float> values(count);
    for (float& value : values)
        value = static_cast<float>(random.uniform(low, high));
    return values;
}

/// The same, each exact in bf16 (and in f32).
inline std::vector<float> random_bf16(std::size_t count, std::uint64_t seed, double low = -1,
                                      double high = 1) {
    std::vector<float> values = random_f32(count, seed, low, high);
    for (float& value : values)
        value = round_to_bf16(value);
    return values;
}

/// count uniform indices of [0, below).
inline std::vector<std::int32_t> random_indices(std::size_t count, std::uint64_t seed,
                                                std::uint64_t below) {
    Random random(seed);
    std::vector<std::int32_t> values(count);
    for (std::int32_t& value : values)
        value = static_cast<std::int32_t>(random.below(below));
    return values;
}

template <class T>
std::vector<double> to_double(const std::vector<T>& values) {
    return {values.begin(), values.end()};
}

inline std::vector<float> to_float(const std::vector<double>& values) {
    std::vector<float> out;
    out.reserve(values.size());
    for (const double value : values)
        out.push_back(static_cast<float>(value));
    return out;
}

// --- checks
// ---------------------------------------------------------------------------------------

/// 1 - 2 Σxy / Σ(x² + y²): 0 for equal vectors (two zero vectors included), 2 for opposite ones,
/// NaN if any element is not finite (compare with EXPECT_LE, which a NaN fails).
template <class X, class Y>
double calc_diff(const X& x, const Y& y) {
    if (x.size() != y.size())
        return std::numeric_limits<double>::quiet_NaN();
    double cross = 0, squares = 0;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const auto a = static_cast<double>(x[i]), b = static_cast<double>(y[i]);
        cross += a * b;
        squares += a * a + b * b;
    }
    if (!std::isfinite(squares))
        return std::numeric_limits<double>::quiet_NaN();
    return squares == 0 ? 0 : 1 - 2 * cross / squares;
}

/// How many f32 values lie between a and b; the largest number if either is NaN.
inline std::uint64_t ulp_distance(float a, float b) {
    if (std::isnan(a) || std::isnan(b))
        return std::numeric_limits<std::uint64_t>::max();
    const auto ordered = [](float value) {
        const auto bits = std::bit_cast<std::uint32_t>(value);
        const auto magnitude = static_cast<std::int64_t>(bits & 0x7fffffffu);
        return bits >> 31 ? -magnitude : magnitude;
    };
    return static_cast<std::uint64_t>(std::abs(ordered(a) - ordered(b)));
}

inline constexpr double kF32Epsilon = 0x1p-24; ///< unit roundoff: half an ulp of 1
inline constexpr double kBf16Epsilon = 0x1p-8; ///< likewise, of 8 significant bits

/// |error| <= absolute + relative * |expected|.
inline auto within(double absolute, double relative) {
    return [=](std::size_t, double expected) { return absolute + relative * std::abs(expected); };
}

/// The bound of f32 sums of `terms` products, given for each element the sum of the terms' absolute
/// values: every rounding errs by at most unit roundoff of a partial sum, which never exceeds that.
/// `storage`: unit roundoff of the result's type. `slack` covers operands that were rounded before.
inline auto sum_bound(std::size_t terms, std::vector<double> absolute_sums,
                      double storage = kF32Epsilon, double slack = 2) {
    return [=, sums = std::move(absolute_sums)](std::size_t i, double expected) {
        return slack * static_cast<double>(terms) * kF32Epsilon * sums[i] +
               storage * std::abs(expected) + 1e-37;
    };
}

/// "[3, 17]" for an element's place in a row-major tensor; an empty shape means one axis.
inline std::string coordinates(std::size_t index, const std::vector<std::uint64_t>& shape) {
    std::string text;
    for (std::size_t axis = shape.size(); axis-- > 0;) {
        const std::size_t extent = axis == 0 ? index + 1 : static_cast<std::size_t>(shape[axis]);
        text = std::to_string(index % extent) + (text.empty() ? "" : ", ") + text;
        index /= extent;
    }
    return "[" + (shape.empty() ? std::to_string(index) : text) + "]";
}

/// How actual elements compare with expected ones and their bounds.
struct Comparison {
    bool good = true;
    double worst = 0; ///< largest error in units of its bound; infinite where no bound allows it
    std::string text; ///< "" if good, else how many are wrong, the first and the worst
};

/// Every actual[i] within bound(i, expected[i]) of expected[i]; otherwise says how many are not and
/// shows the first and the worst: coordinates in `shape`, both values, the error, its bound, the
/// f32 ulps between them. Infinities must match; a NaN matches nothing.
template <class Actual, class Expected, class Bound>
Comparison compare_elements(const Actual& actual, const Expected& expected,
                            const std::vector<std::uint64_t>& shape, Bound&& bound) {
    Comparison result;
    if (actual.size() != expected.size())
        return {false, std::numeric_limits<double>::infinity(),
                std::to_string(actual.size()) + " elements where " +
                    std::to_string(expected.size()) + " were expected"};
    const std::size_t none = actual.size();
    std::size_t wrong = 0, first = none, worst = none;
    for (std::size_t i = 0; i < actual.size(); ++i) {
        const auto a = static_cast<double>(actual[i]), e = static_cast<double>(expected[i]);
        const double error = a == e ? 0 : std::abs(a - e);
        if (error == 0)
            continue;
        const double limit = bound(i, e);
        const double ratio = std::isfinite(error) && limit > 0
                                 ? error / limit
                                 : std::numeric_limits<double>::infinity();
        const bool within = std::isfinite(error) && error <= limit;
        first = !within && wrong++ == 0 ? i : first;
        if (!within && (worst == none || ratio > result.worst))
            worst = i;
        result.worst = std::max(result.worst, ratio);
    }
    if (wrong == 0)
        return result;
    std::ostringstream text;
    text.precision(9);
    const auto show = [&](const char* title, std::size_t i) {
        const auto a = static_cast<double>(actual[i]), e = static_cast<double>(expected[i]);
        text << "\n  " << title << " at " << coordinates(i, shape) << ": actual " << a
             << ", expected " << e << ", error " << std::abs(a - e) << ", bound " << bound(i, e)
             << ", " << ulp_distance(static_cast<float>(a), static_cast<float>(e)) << " ulp";
    };
    text << wrong << " of " << actual.size() << " elements are wrong";
    show("first", first);
    show("worst", worst);
    result.good = false;
    result.text = text.str();
    return result;
}

} // namespace bellows::reference
