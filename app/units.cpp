// SPDX-License-Identifier: MIT
#include "app/units.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>

namespace bellows {

std::string printed(const char* format, double value) {
    std::array<char, 64> text{};
    std::snprintf(text.data(), text.size(), format, value);
    return text.data();
}

std::string number(double value) {
    return printed("%.6g", value);
}

std::string percent(double share) {
    return printed("%.1f %%", 100 * share);
}

std::string format_count(double value) {
    constexpr std::string_view kSuffixes = " kMGTP";
    std::size_t suffix = 0;
    while (std::abs(value) >= 999.5 && suffix + 1 < kSuffixes.size()) {
        value /= 1000;
        ++suffix;
    }
    const double size = std::abs(value);
    const bool whole = suffix == 0 && value == std::floor(value);
    std::string text = printed(whole || size >= 99.95 ? "%.0f"
                               : size >= 9.995        ? "%.1f"
                                                      : "%.2f",
                               value);
    if (suffix > 0) {
        text += kSuffixes[suffix];
    }
    return text;
}

std::string format_duration(double seconds) {
    constexpr double kLongest = 1e9;
    const auto whole = static_cast<std::uint64_t>(
        std::isfinite(seconds) ? std::clamp(std::round(seconds), 0.0, kLongest) : kLongest);
    std::array<char, 64> text{};
    if (whole >= 3600) {
        std::snprintf(text.data(), text.size(), "%llu:%02llu:%02llu",
                      static_cast<unsigned long long>(whole / 3600),
                      static_cast<unsigned long long>(whole / 60 % 60),
                      static_cast<unsigned long long>(whole % 60));
    } else {
        std::snprintf(text.data(), text.size(), "%llu:%02llu",
                      static_cast<unsigned long long>(whole / 60),
                      static_cast<unsigned long long>(whole % 60));
    }
    return text.data();
}

} // namespace bellows
