// SPDX-License-Identifier: MIT
#include <bellows/text/words.hpp>

#include "block_reader.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

namespace bellows {

namespace {

bool is_letter(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           static_cast<unsigned char>(c) >= 0x80;
}

char lower(char c) {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

/// Calls visit(word, reaches_end) for every word.
template <class Visit>
void for_each_word(std::string_view text, Visit&& visit) {
    std::string word;
    for (const char c : text) {
        if (is_letter(c)) {
            word += lower(c);
        } else if (!word.empty()) {
            visit(word, false);
            word.clear();
        }
    }
    if (!word.empty()) {
        visit(word, true);
    }
}

} // namespace

void WordSet::add(std::string_view text) {
    for_each_word(text, [&](const std::string& word, bool) { words_.insert(word); });
}

void WordSet::add(std::string_view text, const WordSet& wanted) {
    for_each_word(text, [&](const std::string& word, bool) {
        if (wanted.words_.contains(word)) {
            words_.insert(word);
        }
    });
}

bool WordSet::contains(std::string_view word) const {
    std::string key(word);
    std::transform(key.begin(), key.end(), key.begin(), lower);
    return words_.contains(key);
}

WordCheck check_words(std::string_view text, const WordSet& known) {
    WordCheck check;
    for_each_word(text, [&](const std::string& word, bool reaches_end) {
        if (!reaches_end) {
            ++check.words;
            check.known += known.contains(word);
        }
    });
    return check;
}

WordSet words_in(const TextFiles& text, const WordSet& wanted, std::uint64_t most_bytes) {
    WordSet words;
    text::BlockReader reader(text, text::Cut::Lines);
    std::uint64_t read = 0;
    for (text::Block block; read < most_bytes && reader.next(block); read += block.text.size()) {
        for (const text::Block::Part& part : block.parts) {
            words.add(std::string_view(block.text).substr(part.first, part.end - part.first),
                      wanted);
        }
    }
    return words;
}

std::string format_word_check(const WordCheck& check, std::string_view where) {
    const auto percent = std::lround(100 * check.share());
    return std::to_string(percent) + " % of " + std::to_string(check.words) +
           (check.words == 1 ? " word" : " words") + " stand in " + std::string(where);
}

} // namespace bellows
