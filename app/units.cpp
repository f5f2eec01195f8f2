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

std::string format_si(double value, std::string_view unit) {
    std::string text = format_count(value);
    const bool prefixed = !text.empty() && text.back() >= 'A';
    text.insert(text.size() - (prefixed ? 1 : 0), " ");
    return text + std::string(unit);
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

namespace {

/// Characters, not bytes: UTF-8's second and later bytes take no place.
std::size_t width_of(std::string_view text) {
    return static_cast<std::size_t>(std::ranges::count_if(
        text, [](char byte) { return (static_cast<unsigned char>(byte) & 0xc0) != 0x80; }));
}

/// Where the value begins in "  name   value"; npos: there is none.
std::size_t second_column(std::string_view line, std::size_t indent) {
    const std::size_t gap = line.find("  ", indent);
    return gap == std::string_view::npos ? gap : line.find_first_not_of(' ', gap);
}

} // namespace

std::string folded(std::string_view text, std::size_t columns) {
    std::string out;
    while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        std::string line(text.substr(0, end));
        const bool closed = end < text.size();
        text.remove_prefix(end + (closed ? 1 : 0));
        const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
        const std::size_t second = second_column(line, indent);
        const std::size_t hang = second < columns / 2 ? second : indent + 2;
        while (width_of(line) > columns) {
            std::size_t cut = line.size(); // the last space that fits, else the first at all
            for (std::size_t at = line.find(' ', hang); at < line.size();
                 at = line.find(' ', at + 1)) {
                if (cut < line.size() && width_of(std::string_view(line).substr(0, at)) > columns)
                    break;
                cut = at;
            }
            if (cut == line.size())
                break;
            out += line.substr(0, line.find_last_not_of(' ', cut) + 1) + "\n";
            const std::size_t next = std::min(line.find_first_not_of(' ', cut), line.size());
            line = std::string(hang, ' ') + line.substr(next);
        }
        out += line + (closed ? "\n" : "");
    }
    return out;
}

} // namespace bellows
