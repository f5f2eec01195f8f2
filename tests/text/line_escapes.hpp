// SPDX-License-Identifier: MIT
#pragma once

// Texts as single lines: "\n", "\r" and "\\" for newline, carriage return and backslash.

#include <string>
#include <string_view>

namespace bellows {

inline std::string unescaped(std::string_view line) {
    std::string out;
    for (std::size_t at = 0; at < line.size(); ++at) {
        if (line[at] == '\\' && at + 1 < line.size()) {
            const char c = line[++at];
            out += c == 'n' ? '\n' : c == 'r' ? '\r' : c;
        } else {
            out += line[at];
        }
    }
    return out;
}

inline std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text) {
        if (c == '\n') {
            out += "\\n";
        } else if (c == '\r') {
            out += "\\r";
        } else if (c == '\\') {
            out += "\\\\";
        } else {
            out += c;
        }
    }
    return out;
}

} // namespace bellows
