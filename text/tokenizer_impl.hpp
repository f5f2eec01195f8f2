// SPDX-License-Identifier: MIT
#pragma once

#include <bellows/text/tokenizer.hpp>

#include "sentence_pieces.hpp"

namespace bellows {

struct Tokenizer::Impl {
    std::string name = "bytes";
    std::string model; ///< the file's content
    std::uint32_t vocabulary = 256;
    std::uint32_t end_of_document = 0;
    std::unique_ptr<text::SentencePieces> pieces; ///< none: bytes
};

} // namespace bellows
