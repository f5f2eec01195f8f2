// SPDX-License-Identifier: MIT
#include "segments.hpp"

#include <algorithm>

namespace bellows::text {

namespace {

/// In a line that is too long: the last cut before `limit`.
std::size_t cut_long_line(std::string_view text, std::size_t from, std::size_t limit) noexcept {
    constexpr std::size_t kLongestCharacter = 4; // UTF-8
    for (std::size_t at = limit; at > from + kLongestSegment / 2; --at) {
        if (text[at] == ' ' && text[at - 1] != ' ') {
            return at;
        }
    }
    for (std::size_t at = limit; at > limit - kLongestCharacter; --at) {
        if ((static_cast<unsigned char>(text[at]) & 0xc0) != 0x80) {
            return at;
        }
    }
    return limit; // no UTF-8
}

bool is_ascii_space(char c) noexcept {
    return c == ' ' || (c >= '\t' && c <= '\r');
}

/// Whether no white space begins there, of Unicode's either.
bool begins_visible(std::string_view text, std::size_t at) noexcept {
    const auto byte = static_cast<unsigned char>(text[at]);
    return byte < 0x80 ? byte > ' ' : byte > 0xc2 && (byte < 0xe1 || byte > 0xe3);
}

bool is_line_start(std::string_view text, std::size_t at) noexcept {
    return text[at - 1] == '\n' && begins_visible(text, at);
}

bool is_word_start(std::string_view text, std::size_t at) noexcept {
    const char next = text[at + 1];
    return text[at] == ' ' && !is_ascii_space(text[at - 1]) &&
           ((next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z'));
}

/// least > 0.
std::size_t line_start(std::string_view text, std::size_t least, bool whole) noexcept {
    const std::size_t end = std::min(text.size(), least + kLongestBlockTail);
    for (std::size_t at = least; at < end; ++at) {
        if (is_line_start(text, at)) {
            return at;
        }
    }
    for (std::size_t at = least; at + 1 < end; ++at) {
        if (is_word_start(text, at)) {
            return at;
        }
    }
    if (whole && text.size() <= least + kLongestBlockTail) {
        return text.size();
    }
    std::size_t at = least;
    while (at < end - 1 && (static_cast<unsigned char>(text[at]) & 0xc0) == 0x80) {
        ++at;
    }
    return at;
}

} // namespace

std::size_t segment_end(std::string_view text, std::size_t from, Cut cut) noexcept {
    const std::size_t limit = std::min(text.size(), from + kLongestSegment);
    std::size_t at = from;
    while (at < limit && text[at] == ' ') {
        ++at;
    }
    for (; at < limit; ++at) {
        if (text[at] == '\n') {
            while (at < limit && text[at] == '\n') {
                ++at;
            }
            return at;
        }
        if (cut == Cut::Words && text[at] == ' ') {
            return at;
        }
    }
    return limit == text.size() ? limit : cut_long_line(text, from, limit);
}

std::size_t block_end(std::string_view text, std::size_t least, bool whole, Cut cut) noexcept {
    if (whole && text.size() <= least) {
        return text.size();
    }
    if (cut == Cut::LineStarts) {
        return line_start(text, least, whole);
    }
    // Behind a run of newlines there is always a cut.
    const std::size_t tail = least + kLongestBlockTail;
    if (const std::size_t newline = text.find('\n', least); newline < tail) {
        const std::size_t behind = text.find_first_not_of('\n', newline);
        if (behind <= tail || (behind == std::string_view::npos && whole)) {
            return std::min(behind, text.size());
        }
    }
    std::size_t at = 0;
    while (at < least && at < text.size()) {
        at = segment_end(text, at, cut);
    }
    return at;
}

} // namespace bellows::text
