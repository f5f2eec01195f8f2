// SPDX-License-Identifier: MIT
#pragma once

// What pictures share: numbers, texts and the look of a document.

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>

namespace bellows {

/// "12.3"
std::string pixels(double value);
/// For text between tags and in attributes.
std::string escaped(std::string_view text);

/// Up to and with the background; the caller ends it with "</svg>\n". Classes of texts: title,
/// subtitle, label, tick.
void begin_svg(std::ostream& out, std::uint64_t width, std::uint64_t height);
/// attributes: of the text, e.g. class="tick" text-anchor="end".
void draw_text(std::ostream& out, double x, double y, const char* attributes,
               std::string_view text);

} // namespace bellows
