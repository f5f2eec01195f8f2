// SPDX-License-Identifier: MIT
#include <bellows/shape/config.hpp>

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <algorithm>
#include <limits>

namespace bellows {

std::string suggestion(std::string_view word, const std::vector<std::string>& candidates) {
    constexpr std::size_t kLongest = 100; // of words that a name may be meant by
    std::string best, all;
    std::size_t best_edits = std::numeric_limits<std::size_t>::max();
    for (const std::string& candidate : candidates) {
        all += (all.empty() ? "" : ", ") + candidate;
        if (word.size() > kLongest)
            continue;
        std::vector<std::size_t> row(candidate.size() + 1); // Levenshtein, one row at a time
        for (std::size_t j = 0; j < row.size(); ++j)
            row[j] = j;
        for (std::size_t i = 0; i < word.size(); ++i) {
            std::size_t diagonal = row[0];
            row[0] = i + 1;
            for (std::size_t j = 0; j < candidate.size(); ++j) {
                const std::size_t replace = diagonal + (word[i] != candidate[j]);
                diagonal = row[j + 1];
                row[j + 1] = std::min({replace, row[j] + 1, row[j + 1] + 1});
            }
        }
        if (row.back() < best_edits) {
            best_edits = row.back();
            best = candidate;
        }
    }
    const bool near = word.size() <= kLongest &&
                      best_edits <= std::max<std::size_t>(2, word.size() / 3) &&
                      2 * best_edits <= word.size() + 1;
    return near ? "; did you mean " + in_quotes(best) + "?" : "; there are: " + all;
}

} // namespace bellows
