// SPDX-License-Identifier: MIT
#pragma once

// Training text: reads files and folders into one array of tokens. Host only; every rank holds its
// own copy, const members may be called from any thread.

#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

struct SkippedFile {
    std::filesystem::path path;
    std::string reason; ///< e.g. "binary", "symbolic link", "empty"
};

/// The tokens of all documents, in the order of the sorted paths, one end-of-document token after
/// each document.
class Corpus {
public:
    /// Files are read as they are named; folders recursively, their regular files in byte order of
    /// their paths. Inside a folder, binary files (a zero byte), symbolic links, hidden and empty
    /// files are skipped and listed; a file that is named itself must serve. A file reached twice
    /// is read once. Throws Error{Io} for what cannot be read, Error{InvalidArgument} if a path
    /// does not exist, a named file is binary or no text is left.
    static Corpus read(std::span<const std::filesystem::path> paths, const Tokenizer& tokenizer);
    /// One document from memory.
    static Corpus from_text(std::string_view text, const Tokenizer& tokenizer);

    std::uint64_t num_tokens() const noexcept { return tokens_.size() / token_bytes_; }
    std::uint64_t num_text_bytes() const noexcept { return num_text_bytes_; }
    std::uint64_t num_documents() const noexcept { return num_documents_; }
    std::uint32_t vocabulary() const noexcept { return vocabulary_; }
    /// Text bytes per token: turns nats per token into nats per byte.
    double bytes_per_token() const noexcept;
    const std::vector<SkippedFile>& skipped() const noexcept { return skipped_; }

    /// Tokens [first, first + out.size()), which must lie inside the corpus.
    void copy(std::uint64_t first, std::span<std::uint32_t> out) const;

private:
    explicit Corpus(const Tokenizer& tokenizer);
    void append(std::string_view text, const Tokenizer& tokenizer);

    std::vector<std::uint8_t> tokens_; // little-endian, token_bytes_ each
    std::uint32_t token_bytes_;
    std::uint32_t vocabulary_;
    std::uint64_t num_text_bytes_ = 0;
    std::uint64_t num_documents_ = 0;
    std::vector<SkippedFile> skipped_;
};

/// "5 documents, 1.2 MiB; skipped 4 (binary 3, hidden 1)".
std::string describe(const Corpus& corpus);

/// Tokens [first, first + count) of a corpus.
struct TokenRange {
    std::uint64_t first = 0;
    std::uint64_t count = 0;
};

struct DataSplit {
    TokenRange train;
    TokenRange holdout; ///< count 0 if nothing is held out
};

/// Holds out the last `holdout_fraction` of the tokens (0 ≤ fraction < 1). Throws
/// Error{InvalidArgument} for other fractions.
DataSplit split_corpus(const Corpus& corpus, double holdout_fraction);

} // namespace bellows
