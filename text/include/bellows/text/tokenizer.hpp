// SPDX-License-Identifier: MIT
#pragma once

// Text to token ids and back: by bytes (the default) or by a sentencepiece model. A tokenizer is
// immutable after construction and may be used from several threads; every rank builds its own.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

namespace text {
class TextEncoder;
}

class Tokenizer {
public:
    /// One token per byte, vocabulary 256. Byte 0 never stands in text: it ends a document.
    static Tokenizer bytes();
    /// A sentencepiece model file. Throws Error{Io} if it cannot be read, Error{Corrupt} if it is
    /// no such model.
    static Tokenizer sentencepiece(const std::filesystem::path& model);
    /// The content of such a file. name: for messages.
    static Tokenizer from_model(std::string model, const std::string& name);
    /// "bytes", or else the path of a sentencepiece model: what a configuration file says.
    static Tokenizer from_name(const std::string& name);

    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    /// Ids are below this.
    std::uint32_t vocabulary() const noexcept;
    /// The id that stands between documents.
    std::uint32_t end_of_document() const noexcept;
    /// "bytes", or the model's path as given.
    const std::string& name() const noexcept;
    /// The content of the model's file, from which from_model() makes the same; "": bytes.
    const std::string& model() const noexcept;
    /// The same for tokenizers that give the same tokens.
    std::uint64_t fingerprint() const noexcept;

    /// A sentencepiece model encodes a text word by word, a word with the spaces before it, or line
    /// by line if its pieces reach over spaces; of lines longer than 16 KiB, part by part. The
    /// tokens are those of the whole text, unless pieces or runs of unknown characters reach over
    /// such cuts.
    std::vector<std::uint32_t> encode(std::string_view text) const;
    /// Ids outside the vocabulary give Error{InvalidArgument}; end_of_document() gives no text.
    std::string decode(std::span<const std::uint32_t> ids) const;

private:
    friend class text::TextEncoder;
    struct Impl;
    explicit Tokenizer(std::unique_ptr<const Impl> impl);
    std::unique_ptr<const Impl> impl_;
};

} // namespace bellows
