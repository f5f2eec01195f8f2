// SPDX-License-Identifier: MIT
#pragma once

// The documents of a text in blocks of some hundred kilobytes, which begin and end at cuts (see
// segments.hpp). One thread at a time.

#include <bellows/base/files.hpp>
#include <bellows/text/text_files.hpp>

#include "segments.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bellows::text {

/// Of one document, or several small ones.
struct Block {
    struct Part {
        std::size_t first = 0, end = 0; ///< in `text`
        int before = -1;                ///< the byte in front of it, -1 at its document's beginning
        bool ends_document = false;
    };
    std::string text;
    std::vector<Part> parts;
};

class BlockReader {
public:
    /// text: must outlive it.
    BlockReader(const TextFiles& text, Cut cut) : text_(&text), cut_(cut) {}

    /// False at the end. Throws Error{Io} for what cannot be read, Error{Corrupt} for a file that
    /// has changed, Error{InvalidArgument} for a binary file (with a zero byte) that was named;
    /// other binary files are left out.
    bool next(Block& block);

    std::uint64_t num_documents() const noexcept { return num_documents_; }
    std::uint64_t num_text_bytes() const noexcept { return num_text_bytes_; }
    /// Of the binary files, by their places among the files.
    const std::vector<std::uint64_t>& binary() const noexcept { return binary_; }

private:
    bool open_next(Block& block);
    void leave_out();
    void read_more(std::size_t bytes);
    const TextFile& file() const noexcept { return text_->files[next_ - 1]; }

    const TextFiles* text_;
    Cut cut_;
    std::size_t next_ = 0; ///< among the files
    // Of a document that is longer than a block:
    FileHandle open_;
    std::uint64_t unread_ = 0; ///< its bytes behind buffer_
    std::string buffer_;
    int before_ = -1;

    std::uint64_t num_documents_ = 0;
    std::uint64_t num_text_bytes_ = 0;
    std::vector<std::uint64_t> binary_;
};

} // namespace bellows::text
