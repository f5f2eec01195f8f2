// SPDX-License-Identifier: MIT
#include "added_tokens.hpp"

#include "utf8.hpp"

#include <algorithm>

namespace bellows::text {

namespace {

bool counts(const AddedToken& token, Recognise recognise) noexcept {
    return recognise == Recognise::All ||
           !(recognise == Recognise::NotSpecial ? token.special : token.marker);
}

bool stands_alone(std::string_view text, std::size_t first, std::size_t end) noexcept {
    std::size_t bytes = 0;
    return (first == 0 || !is_word_character(last_character(text.substr(0, first), bytes))) &&
           (end == text.size() || !is_word_character(utf8_step(text.substr(end)).character));
}

std::size_t without_space_before(std::string_view text, std::size_t least,
                                 std::size_t at) noexcept {
    while (at > least) {
        std::size_t bytes = 0;
        if (!is_white_space(last_character(text.substr(least, at - least), bytes))) {
            break;
        }
        at -= bytes;
    }
    return at;
}

std::size_t behind_space(std::string_view text, std::size_t at) noexcept {
    while (at < text.size()) {
        const Utf8Step step = utf8_step(text.substr(at));
        if (!is_white_space(step.character)) {
            break;
        }
        at += step.bytes;
    }
    return at;
}

} // namespace

AddedTokenFinder::AddedTokenFinder() : nodes_(1), begins_(256, false) {
}

void AddedTokenFinder::add(const AddedToken& token) {
    if (token.content.empty()) {
        return;
    }
    begins_[static_cast<unsigned char>(token.content[0])] = true;
    std::uint32_t at = 0;
    for (const char c : token.content) {
        const auto byte = static_cast<unsigned char>(c);
        auto& next = nodes_[at].next;
        const auto found = std::find_if(next.begin(), next.end(),
                                        [&](const auto& edge) { return edge.first == byte; });
        if (found != next.end()) {
            at = found->second;
        } else {
            const auto made = static_cast<std::uint32_t>(nodes_.size());
            next.emplace_back(byte, made);
            nodes_.emplace_back();
            at = made;
        }
    }
    nodes_[at].token = static_cast<std::int64_t>(tokens_.size());
    tokens_.push_back(token);
}

const AddedToken* AddedTokenFinder::longest_at(std::string_view text,
                                               std::size_t at) const noexcept {
    const AddedToken* found = nullptr;
    for (std::uint32_t node = 0; at < text.size(); ++at) {
        const auto& next = nodes_[node].next;
        const auto edge = std::find_if(
            next.begin(), next.end(), [byte = static_cast<unsigned char>(text[at])](const auto& e) {
                return e.first == byte;
            });
        if (edge == next.end()) {
            break;
        }
        node = edge->second;
        if (nodes_[node].token >= 0) {
            found = &tokens_[static_cast<std::size_t>(nodes_[node].token)];
        }
    }
    return found;
}

void AddedTokenFinder::split(std::string_view text, Recognise recognise, std::string_view own,
                             const Take& take) const {
    std::size_t cut = 0;
    for (std::size_t at = 0; at < text.size() && !tokens_.empty();) {
        if (!begins_[static_cast<unsigned char>(text[at])]) {
            ++at;
            continue;
        }
        const AddedToken* token = longest_at(text, at);
        if (token == nullptr) {
            ++at;
            continue;
        }
        std::size_t first = at;
        std::size_t end = at + token->content.size();
        if (!counts(*token, recognise)) {
            const std::string_view owned = own.substr(0, std::min(end, own.size()));
            if (owned.empty() || owned.find('\0', first) != std::string_view::npos) {
                // What the user wrote hides no token of the template that begins inside it.
                at = std::min(end, owned.find('\1', first + 1));
                continue;
            }
        }
        at = end;
        if (token->single_word && !stands_alone(text, first, end)) {
            continue;
        }
        if (token->lstrip) {
            first = without_space_before(text, cut, first);
        }
        if (token->rstrip) {
            at = end = behind_space(text, end);
        }
        if (cut < first) {
            take(cut, first, nullptr);
        }
        take(first, end, token);
        cut = end;
    }
    if (cut < text.size()) {
        take(cut, text.size(), nullptr);
    }
}

} // namespace bellows::text
