// SPDX-License-Identifier: MIT
#pragma once

// A file of tokens: header, tokens, and the places of the files that were left out as binary (u64
// each, unaligned). Numbers are little-endian, as are the machines that this runs on.

#include "tokenise.hpp"

#include <bellows/base/mapped_file.hpp>

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <vector>

namespace bellows::text {

struct TokenFileHeader {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t token_bytes;
    std::uint64_t vocabulary;
    std::uint64_t fingerprint; ///< of text and tokenizer
    std::uint64_t num_tokens;
    std::uint64_t num_text_bytes;
    std::uint64_t num_documents;
    std::uint64_t content; ///< fingerprint of the tokens
    std::uint64_t num_binary;
};
static_assert(sizeof(TokenFileHeader) == 72);

struct TokenFile {
    MappedFile file;
    TokenFileHeader header;
    std::vector<std::uint64_t> binary() const;
};

/// Nothing if there is none, or if it is none of this version or not whole.
std::optional<TokenFile> open_token_file(const std::filesystem::path& path);

/// Under another name in the same folder, ".<name>.<process>-<n>", until it is whole. Throws
/// Error{Io}, and what tokenise() throws.
void write_token_file(const std::filesystem::path& path, std::uint64_t fingerprint,
                      const TextFiles& text, const Tokenizer& tokenizer,
                      const TokeniseOptions& options);

} // namespace bellows::text
