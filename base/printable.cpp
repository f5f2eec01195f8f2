// SPDX-License-Identifier: MIT
#include <bellows/base/printable.hpp>

#include <cstddef>

namespace bellows {

namespace {

constexpr std::size_t kMostBytes = 4; // of a character in UTF-8

unsigned byte_at(std::string_view text, std::size_t i) {
    return static_cast<unsigned char>(text[i]);
}

/// Bytes of the well-formed UTF-8 character that the text begins with; 0: there is none.
std::size_t character_bytes(std::string_view text) {
    const unsigned first = byte_at(text, 0);
    if (first < 0x80)
        return 1;
    const std::size_t bytes = first >= 0xc2 && first < 0xe0   ? 2
                              : first >= 0xe0 && first < 0xf0 ? 3
                              : first >= 0xf0 && first < 0xf5 ? kMostBytes
                                                              : 0;
    if (bytes == 0 || text.size() < bytes)
        return 0;
    for (std::size_t i = 1; i < bytes; ++i)
        if ((byte_at(text, i) & 0xc0u) != 0x80)
            return 0;
    const unsigned second = byte_at(text, 1);
    const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
    const bool beyond = (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);
    return overlong || beyond ? 0 : bytes;
}

bool is_control(std::string_view character) {
    const unsigned first = byte_at(character, 0);
    return first < 0x20 || first == 0x7f || (first == 0xc2 && byte_at(character, 1) < 0xa0);
}

} // namespace

std::string printable(std::string_view text, std::string_view keep) {
    constexpr const char* kHex = "0123456789abcdef";
    std::string out;
    while (!text.empty()) {
        const std::size_t bytes = character_bytes(text);
        const std::string_view character = text.substr(0, bytes == 0 ? 1 : bytes);
        const bool kept = keep.find(character.front()) != std::string_view::npos;
        if (kept || (bytes > 0 && !is_control(character))) {
            out += character;
        } else {
            for (const char c : character) {
                out += "\\x";
                out += kHex[static_cast<unsigned char>(c) >> 4];
                out += kHex[static_cast<unsigned char>(c) & 15];
            }
        }
        text.remove_prefix(character.size());
    }
    return out;
}

std::string bounded(std::string_view text, std::size_t longest) {
    std::size_t bytes = text.size() > longest ? longest : text.size();
    // Between two characters of UTF-8, of at most 4 bytes, not amid one.
    for (int i = 0;
         i < 3 && bytes < text.size() && bytes > 0 && (byte_at(text, bytes) & 0xc0u) == 0x80; ++i)
        --bytes;
    return printable(text.substr(0, bytes)) + (bytes < text.size() ? "…" : "");
}

} // namespace bellows
