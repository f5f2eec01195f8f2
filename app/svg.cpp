// SPDX-License-Identifier: MIT
#include "app/svg.hpp"

#include "app/units.hpp"

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

} // namespace bellows
