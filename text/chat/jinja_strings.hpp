// SPDX-License-Identifier: MIT
#pragma once

// Python's methods of strings, on marked ones. Pure.

#include "jinja_value.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

namespace bellows::text::jinja {

enum class Side : std::uint8_t { Left, Right, Both };

/// characters: what is stripped; empty: white space.
MarkedText stripped(const MarkedText& text, Side side, std::string_view characters);
/// separator: empty: runs of white space. most: cuts, -1: all.
std::vector<MarkedText> split(const MarkedText& text, std::string_view separator, std::int64_t most,
                              bool from_right);
MarkedText replaced(const MarkedText& text, std::string_view what, const MarkedText& by);
/// ASCII letters alone change.
MarkedText in_upper_case(MarkedText text);
MarkedText in_lower_case(MarkedText text);
/// The places in the bytes where characters begin, and the end.
std::vector<std::size_t> character_places(std::string_view text);

} // namespace bellows::text::jinja
