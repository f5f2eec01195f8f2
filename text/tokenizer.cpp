// SPDX-License-Identifier: MIT
#include <bellows/text/tokenizer.hpp>

#include "bpe/utf8.hpp"
#include "encoder.hpp"
#include "fingerprint.hpp"
#include "tokenizer_impl.hpp"

#include <bellows/base/error.hpp>

#include <utility>

namespace bellows {

Tokenizer::Tokenizer(std::unique_ptr<const Impl> impl) : impl_(std::move(impl)) {
}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::bytes() {
    return Tokenizer(std::make_unique<Impl>());
}

std::uint32_t Tokenizer::vocabulary() const noexcept {
    return impl_->vocabulary;
}

std::uint32_t Tokenizer::end_of_document() const noexcept {
    return impl_->end_of_document;
}

const std::vector<std::uint32_t>& Tokenizer::end_tokens() const noexcept {
    return impl_->end_tokens;
}

std::optional<std::uint32_t> Tokenizer::bos() const noexcept {
    return impl_->bos;
}

std::optional<std::uint32_t> Tokenizer::pad() const noexcept {
    return impl_->pad;
}

std::optional<std::uint32_t> Tokenizer::id_of(std::string_view token) const {
    return impl_->id_of(token);
}

std::optional<std::uint32_t> Tokenizer::Impl::id_of(std::string_view token) const {
    if (bpe) {
        return bpe->id_of(token);
    }
    if (pieces) {
        return pieces->id_of(token);
    }
    return token.size() == 1 ? std::optional<std::uint32_t>(static_cast<unsigned char>(token[0]))
                             : std::nullopt;
}

std::string Tokenizer::Impl::token_text(std::uint32_t id) const {
    return bpe ? std::string(bpe->tokens.bytes(id)) : pieces ? pieces->piece(id) : "";
}

const std::string& Tokenizer::chat_template() const noexcept {
    return impl_->chat_template;
}

const std::string& Tokenizer::name() const noexcept {
    return impl_->name;
}

const std::string& Tokenizer::model() const noexcept {
    return impl_->model;
}

std::uint64_t Tokenizer::fingerprint() const noexcept {
    constexpr std::uint64_t kCuts = 1; // changes with the places where segments.hpp cuts
    return text::Fingerprint().add(kCuts).add(std::string_view(impl_->model)).value();
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const {
    std::vector<std::uint32_t> ids;
    text::TextEncoder(*this).encode(text, -1, true, ids);
    return ids;
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text,
                                             const EncodeOptions& options) const {
    std::vector<std::uint32_t> ids;
    if (options.text_frame) {
        ids = impl_->before_text;
    }
    text::TextEncoder encoder(*this);
    if (options.special_tokens) {
        encoder.encode_marked(text, text::Recognise::All, {}, ids);
    } else {
        encoder.encode(text, -1, true, ids);
    }
    if (options.text_frame) {
        ids.insert(ids.end(), impl_->behind_text.begin(), impl_->behind_text.end());
    }
    return ids;
}

std::string Tokenizer::decode(std::span<const std::uint32_t> ids) const {
    std::string text;
    std::vector<int> pieces;
    for (const std::uint32_t id : ids) {
        require_known(id);
        if (impl_->bpe) {
            if (!impl_->bpe->tokens.special(id)) {
                text += impl_->bpe->tokens.bytes(id);
            }
        } else if (id == impl_->end_of_document) {
            continue;
        } else if (impl_->pieces) {
            pieces.push_back(static_cast<int>(id));
        } else {
            text.push_back(static_cast<char>(id));
        }
    }
    return impl_->bpe ? text::repaired(text) : impl_->pieces ? impl_->pieces->decode(pieces) : text;
}

bool Tokenizer::has_token(std::uint32_t id) const {
    return id < impl_->vocabulary && (!impl_->bpe || !impl_->token_text(id).empty());
}

void Tokenizer::require_known(std::uint32_t id) const {
    if (id >= impl_->vocabulary) {
        throw Error(ErrorCode::InvalidArgument, "token " + std::to_string(id) +
                                                    " is outside the vocabulary of " +
                                                    std::to_string(impl_->vocabulary));
    }
}

} // namespace bellows
