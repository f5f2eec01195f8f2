// SPDX-License-Identifier: MIT
#pragma once

// Training text: the tokens of files and folders, in memory or in a file that ranks share. Host
// only; const members may be called from any thread.

#include <bellows/base/mapped_file.hpp>
#include <bellows/text/text_files.hpp>
#include <bellows/text/tokenizer.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

struct TokeniseOptions {
    unsigned threads = 0; ///< 0: as many as the process may use at once. The tokens stay the same.
    /// Called now and then by the thread that waits for the tokens: bytes of text that are done,
    /// and of all. What it throws ends the work.
    std::function<void(std::uint64_t done, std::uint64_t total)> progress;
};

/// What the tokens of a text follow from: paths, sizes and modification times of its files, and the
/// tokenizer.
std::uint64_t fingerprint(const TextFiles& text, const Tokenizer& tokenizer);

/// The tokens of all documents, in the order of the sorted paths, one end-of-document token after
/// each document. Binary files (with a zero byte) are left out where a folder has them.
class Corpus {
public:
    /// The tokens of find_text(paths), in memory. Throws as find_text() does, Error{Io} for what
    /// cannot be read, Error{InvalidArgument} if a named file is binary or no text is left.
    static Corpus read(std::span<const std::filesystem::path> paths, const Tokenizer& tokenizer);
    static Corpus read(const TextFiles& text, const Tokenizer& tokenizer);
    /// One document from memory.
    static Corpus from_text(std::string_view text, const Tokenizer& tokenizer);

    /// Writes the tokens into a file, which replaces another of its name when it is whole, and
    /// opens it. Throws as read() does, Error{Io} if the file cannot be written.
    static Corpus make(const std::filesystem::path& file, const TextFiles& text,
                       const Tokenizer& tokenizer, const TokeniseOptions& options = {});
    /// Opens a file of make(). Its tokens are mapped: they take no memory of the process. Nothing
    /// if there is no such file, if it is not whole, or if another fingerprint() stands in it.
    /// text: that of the fingerprint, for skipped().
    static std::optional<Corpus> open(const std::filesystem::path& file, std::uint64_t fingerprint,
                                      const TextFiles& text);

    std::uint64_t num_tokens() const noexcept { return num_tokens_; }
    std::uint64_t num_text_bytes() const noexcept { return num_text_bytes_; }
    std::uint64_t num_documents() const noexcept { return num_documents_; }
    std::uint32_t vocabulary() const noexcept { return vocabulary_; }
    /// Bytes of all tokens.
    std::uint64_t bytes() const noexcept { return num_tokens_ * token_bytes_; }
    /// Of the tokens: the same on ranks that have the same.
    std::uint64_t content() const noexcept { return content_; }
    /// Text bytes per token: turns nats per token into nats per byte.
    double bytes_per_token() const noexcept;
    const std::vector<SkippedFile>& skipped() const noexcept { return skipped_; }

    /// Tokens [first, first + out.size()), which must lie inside the corpus. Throws Error{Corrupt}
    /// if the file has been damaged so that one is outside the vocabulary.
    void copy(std::uint64_t first, std::span<std::uint32_t> out) const;

private:
    explicit Corpus(std::uint32_t vocabulary);
    const std::uint8_t* tokens() const noexcept;
    void skip_binary(const TextFiles& text, std::span<const std::uint64_t> files);

    // Little-endian, token_bytes_ each, in one of these:
    std::vector<std::uint8_t> memory_;
    MappedFile file_;

    std::uint32_t token_bytes_;
    std::uint32_t vocabulary_;
    std::uint64_t num_tokens_ = 0;
    std::uint64_t num_text_bytes_ = 0;
    std::uint64_t num_documents_ = 0;
    std::uint64_t content_ = 0;
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
