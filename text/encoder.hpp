// SPDX-License-Identifier: MIT
#pragma once

// Encodes texts on one thread, segment by segment (see segments.hpp), and remembers the tokens of
// short segments: most words of a text have stood in it before.

#include <bellows/text/tokenizer.hpp>

#include "sentence_pieces.hpp"

#include <cstdint>
#include <string_view>
#include <vector>

namespace bellows::text {

class TextEncoder {
public:
    /// The tokenizer must outlive it.
    explicit TextEncoder(const Tokenizer& tokenizer);
    ~TextEncoder();

    /// Where it cuts a document.
    Cut cut() const noexcept { return pieces_ != nullptr ? pieces_->cut() : Cut::Lines; }

    /// Appends the tokens of a part of a document, which begins and ends at cuts. before: the byte
    /// in front of it, -1 at the document's beginning. Throws Error{InvalidArgument}.
    void encode(std::string_view text, int before, std::vector<std::uint32_t>& ids);

private:
    struct Remembered;
    void encode_segment(std::string_view segment, bool prefix, std::vector<std::uint32_t>& ids);

    const SentencePieces* pieces_; ///< null: bytes
    std::vector<Remembered> remembered_;
    std::vector<int> scratch_;
};

} // namespace bellows::text
