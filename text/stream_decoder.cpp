// SPDX-License-Identifier: MIT
#include <bellows/text/stream_decoder.hpp>

#include "bpe/utf8.hpp"
#include "tokenizer_impl.hpp"

#include <algorithm>
#include <string_view>

namespace bellows {

StreamDecoder::StreamDecoder(const Tokenizer& tokenizer, bool special_tokens)
    : tokenizer_(&tokenizer), special_tokens_(special_tokens) {
}

std::string StreamDecoder::add(std::uint32_t id) {
    tokenizer_->require_known(id);
    const Tokenizer::Impl& impl = *tokenizer_->impl_;
    if (impl.pieces) {
        return add_piece(id);
    }
    if (!impl.bpe) {
        if (id == impl.end_of_document) {
            return "";
        }
        held_.push_back(static_cast<char>(id));
    } else if (special_tokens_ || !impl.bpe->tokens.special(id)) {
        held_ += impl.bpe->tokens.bytes(id);
    }
    return text::take_complete(held_);
}

/// What the text grows by. U+FFFD at its end may be the beginning of a character, but no character
/// has more than four bytes.
std::string StreamDecoder::add_piece(std::uint32_t id) {
    constexpr std::size_t kWindow = 8;
    constexpr std::size_t kMostHeld = 3;
    const Tokenizer::Impl& impl = *tokenizer_->impl_;
    if (impl.pieces->is_control(id)) {
        std::string out = finish();
        return special_tokens_ ? out + impl.pieces->piece(id) : out;
    }
    ids_.push_back(static_cast<int>(id));
    const std::string text = impl.pieces->decode(ids_);
    std::size_t whole = text.size();
    for (std::size_t held = 0;
         held < kMostHeld && whole >= shown_ + text::kReplacement.size() &&
         std::string_view(text).substr(0, whole).ends_with(text::kReplacement);
         ++held) {
        whole -= text::kReplacement.size();
    }
    std::string out = text.substr(std::min(shown_, text.size()), whole - std::min(shown_, whole));
    shown_ = std::max(shown_, whole);
    if (shown_ == text.size() && ids_.size() > 2 * kWindow) { // forget what is long past
        ids_.erase(ids_.begin(), ids_.end() - static_cast<std::ptrdiff_t>(kWindow));
        shown_ = impl.pieces->decode(ids_).size();
    }
    return out;
}

std::string StreamDecoder::finish() {
    std::string out = text::repaired(held_);
    held_.clear();
    if (!ids_.empty()) {
        out = tokenizer_->impl_->pieces->decode(ids_).substr(shown_);
        // The next piece does not begin a text: one of these stays before it.
        ids_.erase(ids_.begin(), ids_.end() - 1);
        shown_ = tokenizer_->impl_->pieces->decode(ids_).size();
    }
    return out;
}

} // namespace bellows
