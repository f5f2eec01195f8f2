// SPDX-License-Identifier: MIT
#pragma once

// A sentencepiece model that has been checked, and how it continues a text. Immutable, any thread.

#include "model_check.hpp"
#include "segments.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace bellows::text {

class SentencePieces {
public:
    /// model: the file's content. Throws BadModel, or what the library throws.
    explicit SentencePieces(const std::string& model);
    ~SentencePieces();

    std::uint32_t vocabulary() const noexcept { return vocabulary_; }
    std::uint32_t end_of_document() const noexcept { return end_of_document_; }
    std::optional<std::uint32_t> bos() const;
    std::optional<std::uint32_t> pad() const;
    std::optional<std::uint32_t> id_of(std::string_view piece) const;
    /// A piece that no text gives, as "</s>".
    bool is_control(std::uint32_t id) const;
    std::string piece(std::uint32_t id) const;
    /// Words, unless pieces reach over spaces.
    Cut cut() const noexcept { return traits_.pieces_cross_words ? Cut::Lines : Cut::Words; }

    /// Whether the library shall put a space before a segment, so that its tokens are those that
    /// the segment has in its text. before: the byte in front of it, -1 at the text's beginning.
    bool wants_prefix(int before, std::string_view segment) const noexcept;
    /// ids: replaced. Throws Error{InvalidArgument}.
    void encode(std::string_view segment, bool prefix, std::vector<int>& ids) const;
    /// Throws Error{InvalidArgument}.
    std::string decode(const std::vector<int>& ids) const;

private:
    bool is_space(int byte) const noexcept;

    ModelTraits traits_;
    std::uint32_t vocabulary_ = 0;
    std::uint32_t end_of_document_ = 0;
    /// Without and with a space before what they encode.
    std::array<std::unique_ptr<sentencepiece::SentencePieceProcessor>, 2> by_prefix_;
    std::string spaces_; ///< the ASCII characters that the normaliser takes for spaces
};

} // namespace bellows::text
