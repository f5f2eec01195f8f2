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
