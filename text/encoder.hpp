// SPDX-License-Identifier: MIT
#pragma once

// Encodes texts on one thread: with sentencepiece segment by segment (see segments.hpp).

#include <bellows/text/tokenizer.hpp>

#include "bpe/bpe_model.hpp"
#include "piece_cache.hpp"
#include "sentence_pieces.hpp"

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace bellows::text {

class TextEncoder {
public:
    /// The tokenizer must outlive it.
    explicit TextEncoder(const Tokenizer& tokenizer);
    ~TextEncoder();

    /// Where it cuts a document.
    Cut cut() const noexcept;

    /// Appends the tokens of a part of a document, which begins and ends at cuts. before: the byte
    /// in front of it, -1 at the document's beginning. Throws Error{InvalidArgument}.
    void encode(std::string_view text, int before, bool ends_document,
                std::vector<std::uint32_t>& ids);
    /// Of a whole text with special tokens, see AddedTokenFinder::split().
    void encode_marked(std::string_view text, Recognise recognise, std::string_view own,
                       std::vector<std::uint32_t>& ids);

private:
    void encode_pieces(std::string_view text, int before, std::vector<std::uint32_t>& ids);
    void encode_segment(std::string_view segment, bool prefix, std::vector<std::uint32_t>& ids);

    const SentencePieces* pieces_; ///< null: BPE or bytes
    const AddedTokenFinder* control_pieces_;
    std::optional<BpeEncoder> bpe_;
    PieceCache cache_;
    std::vector<int> scratch_;
};

} // namespace bellows::text
