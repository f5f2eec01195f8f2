// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/text/tokenizer.hpp>

#include "bpe/bpe_model.hpp"
#include "sentence_pieces.hpp"

namespace bellows {

struct Tokenizer::Impl {
    std::string name = "bytes";
    std::string model; ///< the file's content, or that of several (see tokenizer_files.hpp)
    std::uint32_t vocabulary = 256;
    std::uint32_t end_of_document = 0;
    std::vector<std::uint32_t> end_tokens{0};
    std::optional<std::uint32_t> bos, pad;
    std::string chat_template;
    std::vector<std::uint32_t> before_text, behind_text; ///< put around a text on request
    // One of them, or none: bytes.
    std::unique_ptr<text::SentencePieces> pieces;
    text::AddedTokenFinder control_pieces; ///< of sentencepiece
    std::unique_ptr<text::BpeModel> bpe;

    std::optional<std::uint32_t> id_of(std::string_view token) const;
    /// As id_of() takes it; "" where there is none.
    std::string token_text(std::uint32_t id) const;
    /// All of it from `model`.
    void read();

private:
    void read_pieces(const std::string& content);
    void read_special_tokens(const std::map<std::string, std::string>& files);
};

} // namespace bellows
