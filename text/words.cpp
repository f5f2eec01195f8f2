// SPDX-License-Identifier: MIT
#include <bellows/text/words.hpp>

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

std::string format_word_check(const WordCheck& check, std::string_view where) {
    const auto percent = std::lround(100 * check.share());
    return std::to_string(percent) + " % of " + std::to_string(check.words) +
           (check.words == 1 ? " word" : " words") + " stand in " + std::string(where);
}

} // namespace bellows
