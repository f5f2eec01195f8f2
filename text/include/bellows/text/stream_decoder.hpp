// SPDX-License-Identifier: MIT
#pragma once

// The text of tokens that come one by one, as complete UTF-8: a character whose bytes lie in
// several tokens is held back until it is whole. One thread at a time.

#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace bellows {

class StreamDecoder {
public:
    /// The tokenizer must outlive it. special_tokens: they give text, too.
    explicit StreamDecoder(const Tokenizer& tokenizer, bool special_tokens = false);

    /// The text that the token completes, often "". Bytes that are no UTF-8 become U+FFFD. Ids
    /// outside the vocabulary give Error{InvalidArgument}.
    std::string add(std::uint32_t id);
    /// What is held back: U+FFFD, if it is an unfinished character. Then all begins anew.
    std::string finish();

private:
    std::string add_piece(std::uint32_t id);

    const Tokenizer* tokenizer_;
    bool special_tokens_;
    std::string held_; ///< the beginning of a character
    // Of sentencepiece, whose tokens depend on those before them:
    std::vector<int> ids_;
    std::size_t shown_ = 0; ///< bytes of the text of ids_ that were given out
};

} // namespace bellows
