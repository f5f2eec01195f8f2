// SPDX-License-Identifier: MIT
#include "encoder.hpp"

#include "tokenizer_impl.hpp"

#include <span>

namespace bellows::text {

TextEncoder::TextEncoder(const Tokenizer& tokenizer)
    : pieces_(tokenizer.impl_->pieces.get()), control_pieces_(&tokenizer.impl_->control_pieces) {
    if (tokenizer.impl_->bpe) {
        bpe_.emplace(*tokenizer.impl_->bpe);
    }
}

TextEncoder::~TextEncoder() = default;

Cut TextEncoder::cut() const noexcept {
    return bpe_ ? Cut::LineStarts : pieces_ != nullptr ? pieces_->cut() : Cut::Lines;
}

void TextEncoder::encode(std::string_view text, int before, bool ends_document,
                         std::vector<std::uint32_t>& ids) {
    if (bpe_) {
        // Expressions look at what follows: it is made up as the cut has it.
        const bool at_line_start = text.ends_with('\n');
        bpe_->encode(text, {.follows = ends_document ? "" : at_line_start ? "a" : " a"}, ids);
    } else if (pieces_ != nullptr) {
        encode_pieces(text, before, ids);
    } else {
        const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
        ids.insert(ids.end(), bytes, bytes + text.size());
    }
}

void TextEncoder::encode_marked(std::string_view text, Recognise recognise, std::string_view own,
                                std::vector<std::uint32_t>& ids) {
    if (bpe_) {
        bpe_->encode(text, {.recognise = recognise, .own = own}, ids);
        return;
    }
    control_pieces_->split(
        text, recognise, own, [&](std::size_t first, std::size_t end, const AddedToken* token) {
            if (token != nullptr) {
                ids.push_back(token->id);
                return;
            }
            // Behind a token there is no beginning of a text.
            encode(text.substr(first, end - first), first == 0 ? -1 : '>', true, ids);
        });
}

void TextEncoder::encode_pieces(std::string_view text, int before,
                                std::vector<std::uint32_t>& ids) {
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = segment_end(text, at, cut());
        const std::string_view segment = text.substr(at, end - at);
        encode_segment(segment, pieces_->wants_prefix(before, segment), ids);
        before = static_cast<unsigned char>(segment.back());
        at = end;
    }
}

void TextEncoder::encode_segment(std::string_view segment, bool prefix,
                                 std::vector<std::uint32_t>& ids) {
    const bool is_word = cut() == Cut::Words;
    if (is_word && cache_.append(segment, prefix, ids)) {
        return;
    }
    pieces_->encode(segment, prefix, scratch_);
    const std::size_t before = ids.size();
    ids.insert(ids.end(), scratch_.begin(), scratch_.end());
    if (is_word) {
        cache_.remember(segment, prefix, std::span(ids).subspan(before));
    }
}

} // namespace bellows::text
