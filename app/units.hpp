// SPDX-License-Identifier: MIT
#pragma once

// Numbers for people. Pure functions, any thread. Bytes: format_bytes() of base/memory_sizes.hpp.

#include <cstddef>
#include <string>
#include <string_view>

namespace bellows {

/// printf's format for one double.
std::string printed(const char* format, double value);
/// Six digits: 0.25, 1234.56.
std::string number(double value);
/// 0.123 → "12.3 %".
std::string percent(double share);
/// 1234567 → "1.23M"; three digits and a suffix of k, M, G, T, P.
std::string format_count(double value);
/// "1.92 MFLOP", "50.0 GB": the same with a unit.
std::string format_si(double value, std::string_view unit);
/// 75 → "1:15", 3675 → "1:01:15".
std::string format_duration(double seconds);

/// Lines of more than `columns` characters break at spaces. What follows stands under the second
/// column of "  name   value" where that leaves room, else two places further in than its line.
std::string folded(std::string_view text, std::size_t columns);

} // namespace bellows
