// SPDX-License-Identifier: MIT
#include "app/pictures/svg.hpp"

#include "app/units.hpp"

#include <algorithm>

namespace bellows {

std::string pixels(double value) {
    return printed("%.1f", value);
}

std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) {
        switch (c) {
        case '&':
            out += "&amp;";
            break;
        case '<':
            out += "&lt;";
            break;
        case '>':
            out += "&gt;";
            break;
        case '"':
            out += "&quot;";
            break;
        default:
            // XML has no other control characters, not even escaped.
            out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
        }
    }
    return out;
}

void draw_text(std::ostream& out, double x, double y, const char* attributes,
               std::string_view text) {
    out << "<text x=\"" << pixels(x) << "\" y=\"" << pixels(y) << "\" " << attributes << ">"
        << escaped(text) << "</text>\n";
}

void begin_svg(std::ostream& out, std::uint64_t width, std::uint64_t height) {
    out << "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" << width << "\" height=\"" << height
        << "\" viewBox=\"0 0 " << width << " " << height
        << "\">\n<style>text{font-family:system-ui,sans-serif;fill:#374151}"
           ".title{font-size:19px;font-weight:600;fill:#111827}.subtitle{font-size:13px;"
           "fill:#6b7280}.label{font-size:14px}.tick{font-size:12px}</style>\n"
           "<rect width=\"100%\" height=\"100%\" fill=\"#fdfdfc\"/>\n";
}

namespace {

constexpr double kFirstTitle = 34, kFirstSubtitle = 20; // y of baselines, from the text above
constexpr double kTitleLine = 24, kSubtitleLine = 17, kBelow = 8;

/// Calls draw(text's class, y of its baseline, line) for each line.
template <class Draw>
double lay_out_heading(double width, std::string_view title, std::string_view subtitle,
                       const Draw& draw) {
    double y = kFirstTitle - kTitleLine;
    for (const std::string& line : wrapped(title, width, kTitleLetter))
        draw("class=\"title\"", y += kTitleLine, line);
    y += kFirstSubtitle - kSubtitleLine;
    for (const std::string& line : wrapped(subtitle, width, kSubtitleLetter))
        draw("class=\"subtitle\"", y += kSubtitleLine, line);
    return y + kBelow;
}

/// The least index from `at` on that is not within a UTF-8 character.
std::size_t whole_character(std::string_view text, std::size_t at) {
    while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80)
        ++at;
    return at;
}

} // namespace

std::vector<std::string> wrapped(std::string_view text, double width, double letter) {
    const auto most = static_cast<std::size_t>(std::max(width / letter, 1.0));
    std::vector<std::string> lines;
    while (text.size() > most) {
        std::size_t end = text.rfind(' ', most);
        const bool at_space = end != std::string_view::npos && end > 0;
        if (!at_space)
            end = whole_character(text, most);
        lines.emplace_back(text.substr(0, end));
        text.remove_prefix(std::min(end + (at_space ? 1 : 0), text.size()));
    }
    if (!text.empty())
        lines.emplace_back(text);
    return lines;
}

double draw_heading(std::ostream& out, double x, double width, std::string_view title,
                    std::string_view subtitle) {
    return lay_out_heading(width, title, subtitle,
                           [&](const char* attributes, double y, const std::string& line) {
                               draw_text(out, x, y, attributes, line);
                           });
}

double heading_bottom(double width, std::string_view title, std::string_view subtitle) {
    return lay_out_heading(width, title, subtitle, [](const char*, double, const std::string&) {});
}

} // namespace bellows
