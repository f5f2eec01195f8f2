// SPDX-License-Identifier: MIT
#include "bpe_model.hpp"

#include "utf8.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>

namespace bellows::text {

void TokenTable::set(std::uint32_t id, std::string_view bytes) {
    constexpr std::size_t kMostBytes = std::size_t{1} << 29;
    if (id >= kMostIds) {
        throw Error(ErrorCode::Corrupt, "the token " + in_quotes(bytes) + " has the id " +
                                            std::to_string(id) + "; ids must be below " +
                                            std::to_string(kMostIds));
    }
    if (text_.size() + bytes.size() > kMostBytes) {
        throw Error(ErrorCode::Corrupt, "all tokens together have too many bytes");
    }
    if (id >= entries_.size()) {
        entries_.resize(std::size_t{id} + 1);
    }
    Entry& entry = entries_[id];
    if (entry.known) {
        if (this->bytes(id) != bytes) {
            throw Error(ErrorCode::Corrupt, "the tokens " + in_quotes(this->bytes(id)) + " and " +
                                                in_quotes(bytes) + " have the same id " +
                                                std::to_string(id));
        }
        return;
    }
    entry.first = static_cast<std::uint32_t>(text_.size());
    entry.bytes = static_cast<std::uint32_t>(bytes.size()) & 0x3fffffffu;
    entry.known = 1;
    text_ += bytes;
}

std::string_view TokenTable::bytes(std::uint32_t id) const noexcept {
    return std::string_view(text_).substr(entries_[id].first, entries_[id].bytes);
}

void BpeModel::add(AddedToken token, std::string_view bytes) {
    constexpr std::size_t kLongest = 4096;
    if (token.content.empty() || token.content.size() > kLongest) {
        throw Error(ErrorCode::Corrupt,
                    "an added token has " + std::to_string(token.content.size()) +
                        " bytes; it must have 1 to " + std::to_string(kLongest));
    }
    if (!added.emplace(token.content, token.id).second) {
        throw Error(ErrorCode::Corrupt,
                    "the added token " + in_quotes(token.content) + " stands there twice");
    }
    tokens.set(token.id, bytes);
    if (token.special) {
        tokens.mark_special(token.id);
    }
    token.marker = token.special || token.content.starts_with('<') || token.content.ends_with('>');
    if (token.normalized) {
        std::string normalised;
        if (nfc && normalise_nfc(token.content, normalised)) {
            token.content = normalised;
        }
        added_in_normalised_text.add(token);
    } else {
        added_in_text.add(token);
    }
}

std::optional<std::uint32_t> BpeModel::id_of(std::string_view token) const {
    for (const TokenIds* ids : {&added, &bpe.tokens()}) {
        if (const auto found = ids->find(token); found != ids->end()) {
            return found->second;
        }
    }
    return std::nullopt;
}

void BpeEncoder::encode(std::string_view text, const Options& options,
                        std::vector<std::uint32_t>& ids) {
    constexpr std::size_t kLongest = (std::size_t{1} << 31) - 1;
    // Broken bytes may grow threefold.
    if (text.size() > kLongest / kReplacement.size() - options.follows.size()) {
        throw Error(ErrorCode::InvalidArgument,
                    "a text of " + std::to_string(text.size()) +
                        " bytes is too long for one call; give it in parts");
    }
    std::string changed;
    if (!is_utf8(text)) {
        changed = repaired(text);
        text = changed;
    }
    const std::size_t counted = text.size();
    if (!options.follows.empty()) {
        if (changed.empty()) {
            changed = text;
        }
        changed += options.follows;
        text = changed;
    }
    model_->added_in_text.split(text, options.recognise, options.own,
                                [&](std::size_t first, std::size_t end, const AddedToken* token) {
                                    if (first >= counted) {
                                        return;
                                    }
                                    if (token != nullptr) {
                                        ids.push_back(token->id);
                                        return;
                                    }
                                    Options inside = options;
                                    inside.own = options.own.substr(
                                        std::min(first, options.own.size()), end - first);
                                    encode_text(text.substr(first, end - first), inside,
                                                std::min(counted, end) - first, ids);
                                });
}

/// Between tokens that stand in the text as it is.
void BpeEncoder::encode_text(std::string_view text, const Options& options, std::size_t counted,
                             std::vector<std::uint32_t>& ids) {
    std::string normalised;
    std::string own(options.own);
    if (model_->nfc && normalise_nfc(text, normalised)) {
        counted = normalised.size() - (text.size() - counted);
        text = normalised;
        if (!own.empty()) { // which bytes were whose is lost
            own.assign(text.size(), own.find('\0') == std::string::npos ? '\1' : '\0');
        }
    }
    model_->added_in_normalised_text.split(
        text, options.recognise, own,
        [&](std::size_t first, std::size_t end, const AddedToken* token) {
            if (first >= counted) {
                return;
            }
            if (token != nullptr) {
                ids.push_back(token->id);
                return;
            }
            encode_segment(text.substr(first, end - first), std::min(counted, end) - first, ids);
        });
}

void BpeEncoder::encode_segment(std::string_view text, std::size_t counted,
                                std::vector<std::uint32_t>& ids) {
    model_->pieces.split(text, matcher_, [&](std::string_view piece) {
        const auto first = static_cast<std::size_t>(piece.data() - text.data());
        if (first >= counted) {
            return;
        }
        piece = piece.substr(0, counted - first);
        if (cache_.append(piece, false, ids)) {
            return;
        }
        const std::size_t before = ids.size();
        model_->bpe.encode(piece, scratch_, ids);
        cache_.remember(piece, false, std::span(ids).subspan(before));
    });
}

} // namespace bellows::text
