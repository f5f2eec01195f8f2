// SPDX-License-Identifier: MIT
#include "utf8.hpp"

#include <bellows/base/error.hpp>

#include <utf8proc.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace bellows::text {

namespace {

/// The bytes of a character that begins with `first`; 0: none does.
std::uint8_t length_of(unsigned char first) noexcept {
    return first < 0x80   ? 1
           : first < 0xc2 ? 0
           : first < 0xe0 ? 2
           : first < 0xf0 ? 3
           : first < 0xf5 ? 4
                          : 0;
}

/// No overlong form, no surrogate, nothing behind U+10FFFF.
bool may_follow(unsigned char first, unsigned char second) noexcept {
    const unsigned char least = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
    const unsigned char most = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
    return second >= least && second <= most;
}

std::string replace_broken(std::string_view text, bool keep_unfinished, std::size_t& used) {
    std::string out;
    out.reserve(text.size());
    for (used = 0; used < text.size();) {
        const Utf8Step step = utf8_step(text.substr(used));
        if (step.kind == Utf8Step::Kind::Character) {
            out.append(text, used, step.bytes);
        } else if (step.kind == Utf8Step::Kind::Unfinished && keep_unfinished) {
            break;
        } else {
            out += kReplacement;
        }
        used += step.bytes;
    }
    return out;
}

/// Whether every character stands before U+0300, or in a range that NFC leaves alone whatever
/// stands beside it.
bool surely_nfc(std::string_view text) noexcept {
    for (std::size_t at = 0; at < text.size();) {
        const auto byte = static_cast<unsigned char>(text[at]);
        if (byte < 0x80) {
            ++at;
        } else if (byte < 0xcc) { // before U+0300
            at += 2;
        } else if (byte >= 0xe4 && byte <= 0xe9) { // U+4000 to U+9FFF: ideographs
            at += 3;
        } else {
            return false;
        }
    }
    return true;
}

} // namespace

Utf8Step utf8_step(std::string_view text) noexcept {
    const auto at = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const std::uint8_t bytes = length_of(at(0));
    if (bytes == 0) {
        return {Utf8Step::Kind::Broken, 1};
    }
    char32_t character = bytes == 1 ? at(0) : at(0) & (0x7fu >> bytes);
    for (std::uint8_t i = 1; i < bytes; ++i) {
        if (i == text.size()) {
            return {Utf8Step::Kind::Unfinished, i};
        }
        if ((at(i) & 0xc0) != 0x80 || (i == 1 && !may_follow(at(0), at(1)))) {
            return {Utf8Step::Kind::Broken, i};
        }
        character = character << 6 | (at(i) & 0x3fu);
    }
    return {Utf8Step::Kind::Character, bytes, character};
}

bool is_utf8(std::string_view text) noexcept {
    for (std::size_t at = 0; at < text.size();) {
        std::uint64_t word = 0;
        if (text.size() - at >= sizeof word) { // eight of ASCII at once
            std::memcpy(&word, text.data() + at, sizeof word);
            if ((word & 0x8080808080808080u) == 0) {
                at += sizeof word;
                continue;
            }
        }
        const Utf8Step step = utf8_step(text.substr(at));
        if (step.kind != Utf8Step::Kind::Character) {
            return false;
        }
        at += step.bytes;
    }
    return true;
}

std::string repaired(std::string_view text) {
    std::size_t used = 0;
    return replace_broken(text, false, used);
}

std::string take_complete(std::string& held) {
    std::size_t used = 0;
    std::string out = replace_broken(held, true, used);
    held.erase(0, used);
    return out;
}

void append_utf8(std::string& text, char32_t character) {
    std::array<utf8proc_uint8_t, 4> bytes;
    const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes.data());
    text.append(reinterpret_cast<const char*>(bytes.data()), static_cast<std::size_t>(count));
}

bool is_white_space(char32_t c) noexcept {
    return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
           c == 0x205f || c == 0x3000;
}

bool is_word_character(char32_t character) noexcept {
    switch (utf8proc_category(static_cast<utf8proc_int32_t>(character))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        return false;
    }
}

char32_t last_character(std::string_view text, std::size_t& bytes) noexcept {
    std::size_t at = text.size() - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) {
        --at;
    }
    bytes = text.size() - at;
    return utf8_step(text.substr(at)).character;
}

bool normalise_nfc(std::string_view text, std::string& out) {
    if (surely_nfc(text)) {
        return false;
    }
    utf8proc_uint8_t* result = nullptr;
    const utf8proc_ssize_t bytes =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                     static_cast<utf8proc_ssize_t>(text.size()), &result,
                     static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    if (bytes < 0) {
        throw Error(ErrorCode::OutOfMemory,
                    std::string("NFC of a text failed: ") + utf8proc_errmsg(bytes));
    }
    const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owned(result, &std::free);
    const std::string_view normalised(reinterpret_cast<const char*>(result),
                                      static_cast<std::size_t>(bytes));
    if (normalised == text) {
        return false;
    }
    out = normalised;
    return true;
}

} // namespace bellows::text
