// SPDX-License-Identifier: MIT
#pragma once

// All pictures share this: how numbers and texts are written, and the look of a document.

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

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

/// About how wide a letter of a class is, in pixels: no letter of such a text is wider on average.
inline constexpr double kTitleLetter = 10.5, kSubtitleLetter = 7.2, kTickLetter = 7.2;

/// The text in lines of at most `width` pixels, broken at spaces or, within a longer word,
/// anywhere.
std::vector<std::string> wrapped(std::string_view text, double width, double letter);

/// Title and subtitle from the top of a document on, wrapped to `width` pixels. Returns the y below
/// them, at which something else may begin.
double draw_heading(std::ostream& out, double x, double width, std::string_view title,
                    std::string_view subtitle);
/// The same y without drawing.
double heading_bottom(double width, std::string_view title, std::string_view subtitle);

} // namespace bellows
