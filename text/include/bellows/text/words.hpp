// SPDX-License-Identifier: MIT
#pragma once

// A plain measure of generated text: how many of its words stand in another. Any thread.

#include <bellows/text/text_files.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <string_view>

namespace bellows {

/// The different words of a text: runs of letters (ASCII, and all bytes from 0x80 on), in lower
/// case.
class WordSet {
public:
    WordSet() = default;
    explicit WordSet(std::string_view text) { add(text); }
    void add(std::string_view text);
    /// Only the words that stand in `wanted`, too: what it holds stays as small as that.
    void add(std::string_view text, const WordSet& wanted);
    bool contains(std::string_view word) const;
    std::uint64_t size() const noexcept { return words_.size(); }

private:
    std::set<std::string, std::less<>> words_;
};

struct WordCheck {
    std::uint64_t words = 0;
    std::uint64_t known = 0;
    double share() const noexcept {
        return words == 0 ? 0 : static_cast<double>(known) / static_cast<double>(words);
    }
};

/// How many words of `text` stand in the set. A word that runs to the very end may have been cut
/// off and does not count.
WordCheck check_words(std::string_view text, const WordSet& known);

/// The words of `wanted` that stand in the first `most_bytes` of a text. Throws as Corpus::read()
/// does.
WordSet words_in(const TextFiles& text, const WordSet& wanted, std::uint64_t most_bytes);

/// "71 % of 45 words stand in the training text" for `where` "the training text".
std::string format_word_check(const WordCheck& check, std::string_view where);

} // namespace bellows
