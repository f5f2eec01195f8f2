// SPDX-License-Identifier: MIT
#include "app/sampling.hpp"

#include "app/mix.hpp"

#include <bellows/engine/error.hpp>

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

std::uint32_t sample_token(std::span<const float> logits, const SamplingParams& params,
                           std::uint64_t position) {
    const auto bad = [](float x) { return std::isnan(x) || (std::isinf(x) && x > 0); };
    const auto greatest = std::max_element(logits.begin(), logits.end());
    if (std::any_of(logits.begin(), logits.end(), bad) || greatest == logits.end() ||
        std::isinf(*greatest)) {
        throw Error(ErrorCode::InvalidArgument, "the model's " + std::to_string(logits.size()) +
                                                    " logits hold no finite maximum");
    }
    if (!(params.temperature >= 0) || std::isinf(params.temperature)) {
        throw Error(ErrorCode::InvalidArgument,
                    "temperature " + std::to_string(params.temperature) + " must be at least 0");
    }
    const auto likeliest = static_cast<std::uint32_t>(greatest - logits.begin());
    if (params.temperature == 0) {
        return likeliest;
    }
    const double top = *greatest;
    const auto weight = [&](float x) { return std::exp((x - top) / params.temperature); };
    double total = 0;
    for (const float x : logits) {
        total += weight(x);
    }
    // 53 bits: a double in [0, 1).
    const double uniform = static_cast<double>(mix(mix(params.seed) ^ position) >> 11) * 0x1.0p-53;
    double left = uniform * total;
    for (std::size_t id = 0; id < logits.size(); ++id) {
        left -= weight(logits[id]);
        if (left < 0) {
            return static_cast<std::uint32_t>(id);
        }
    }
    return likeliest; // rounding left a rest
}

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
