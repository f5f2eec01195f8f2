// SPDX-License-Identifier: MIT
#pragma once

// Cuts a text into the pieces that byte-pair encoding never joins: each expression cuts every piece
// of the one before it into its matches and what stands between them. Immutable; any thread.

#include "regex.hpp"

#include <cstddef>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows::text {

class PreTokenizer {
public:
    void add(Regex regex) { splits_.push_back(std::move(regex)); }
    std::size_t size() const noexcept { return splits_.size(); }

    /// take(piece) gets the pieces in order, none of them empty. text: UTF-8.
    template <class Take>
    void split(std::string_view text, Matcher& matcher, Take&& take) const {
        split_from(0, text, matcher, take);
    }

private:
    template <class Take>
    void split_from(std::size_t stage, std::string_view text, Matcher& matcher, Take& take) const {
        if (text.empty()) {
            return;
        }
        if (stage == splits_.size()) {
            take(text);
            return;
        }
        std::size_t cut = 0;
        for (std::size_t from = 0; from < text.size();) {
            const Regex::Match match = splits_[stage].find(text, from, matcher);
            if (!match.found) {
                break;
            }
            if (match.end == match.first) { // nothing: go on behind the next character
                from = match.first + 1;
                while (from < text.size() &&
                       (static_cast<unsigned char>(text[from]) & 0xc0) == 0x80) {
                    ++from;
                }
                continue;
            }
            split_from(stage + 1, text.substr(cut, match.first - cut), matcher, take);
            split_from(stage + 1, text.substr(match.first, match.end - match.first), matcher, take);
            cut = from = match.end;
        }
        split_from(stage + 1, text.substr(cut), matcher, take);
    }

    std::vector<Regex> splits_;
};

} // namespace bellows::text
