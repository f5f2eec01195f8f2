// SPDX-License-Identifier: MIT
#include "step_input.hpp"

#include <algorithm>

namespace bellows {

namespace {

template <class T>
std::vector<T> slice(const std::vector<T>& all, std::uint64_t first, std::uint64_t end) {
    return {all.begin() + static_cast<std::ptrdiff_t>(first),
            all.begin() + static_cast<std::ptrdiff_t>(end)};
}

template <class T>
void add(std::vector<T>& to, const std::vector<T>& more) {
    to.insert(to.end(), more.begin(), more.end());
}

} // namespace

StepInput part_of(const StepInput& input, std::uint64_t first, std::uint64_t end) {
    StepInput part;
    part.tokens = slice(input.tokens, first, end);
    part.positions = slice(input.positions, first, end);
    part.places = slice(input.places, first, end);
    std::uint64_t row = 0; // of the query
    for (const ops::PagedQueries& query : input.queries) {
        const std::uint64_t from = std::max(row, first), to = std::min(row + query.rows, end);
        if (from < to) {
            part.queries.push_back({.rows = to - from,
                                    .keys = query.keys - (row + query.rows - to),
                                    .sequence = static_cast<std::uint32_t>(part.tables.size())});
            part.tables.push_back(input.tables[query.sequence]);
        }
        row += query.rows;
    }
    std::uint32_t drawn_before = 0; // by rows ahead of the part
    for (std::size_t i = 0; i < input.sampled_rows.size(); ++i) {
        const std::uint32_t sampled = input.sampled_rows[i];
        drawn_before += sampled < first;
        if (sampled < first || sampled >= end)
            continue;
        if (!input.draft_settings.empty())
            part.draft_settings.push_back(input.draft_settings[i]);
        part.sampled_rows.push_back(static_cast<std::uint32_t>(sampled - first));
        part.settings.push_back(input.settings[i]);
    }
    if (!input.next_tokens.empty())
        part.next_tokens = slice(input.next_tokens, first, end);
    for (std::uint32_t& token : part.next_tokens)
        if (token >= ops::kDrawnBefore)
            token -= drawn_before;
    // The settings say where in these theirs are.
    part.history = input.history;
    part.biases = input.biases;
    part.top_log_probs = input.top_log_probs;
    return part;
}

void StepOutput::append(const StepOutput& more) {
    add(tokens, more.tokens);
    add(log_probs, more.log_probs);
    add(top_tokens, more.top_tokens);
    add(top_log_probs, more.top_log_probs);
    add(drafts, more.drafts);
    add(lacking, more.lacking);
    again = again || more.again;
}

} // namespace bellows
