// SPDX-License-Identifier: MIT
#pragma once

// Turns files into tokens on several threads; the tokens do not depend on how many.

#include <bellows/text/corpus.hpp>

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace bellows::text {

struct Tokenised {
    std::uint64_t num_tokens = 0;
    std::uint64_t num_text_bytes = 0;
    std::uint64_t num_documents = 0;
    std::uint64_t content = 0;         ///< fingerprint of the tokens
    std::vector<std::uint64_t> binary; ///< files left out, by their places in the text
};

/// 1, 2 or 4.
std::uint32_t token_bytes(std::uint32_t vocabulary) noexcept;

/// Little-endian, `width` bytes each; appended.
void pack_tokens(std::span<const std::uint32_t> ids, std::uint32_t width,
                 std::vector<std::uint8_t>& out);

/// write: gets the tokens in order, packed, from one thread at a time. Throws what reading,
/// encoding, write and options.progress throw, Error{InvalidArgument} if no text is left.
Tokenised tokenise(const TextFiles& text, const Tokenizer& tokenizer,
                   const TokeniseOptions& options,
                   const std::function<void(std::span<const std::uint8_t>)>& write);

} // namespace bellows::text
