// SPDX-License-Identifier: MIT
#pragma once

// Text to token ids and back: by bytes (the default), by a Hugging Face tokenizer.json (byte-level
// BPE), a tiktoken.model, or a sentencepiece model. A tokenizer is immutable after construction and
// may be used from several threads; every rank builds its own.

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bellows {

class ChatTemplate;
class StreamDecoder;

namespace text {
class TextEncoder;
}

struct EncodeOptions {
    /// Recognise special tokens that stand in the text. Off: they are ordinary text, so that what a
    /// user writes cannot forge them. Never for a text from elsewhere.
    bool special_tokens = false;
    /// Put in front of the text and behind it what the tokenizer's own rules say (bos, as a rule).
    bool text_frame = false;
};

class Tokenizer {
public:
    /// One token per byte, vocabulary 256. Byte 0 never stands in text: it ends a document.
    static Tokenizer bytes();
    /// A sentencepiece model file. Throws Error{Io} if it cannot be read, Error{Corrupt} if it is
    /// no such model.
    static Tokenizer sentencepiece(const std::filesystem::path& model);
    /// What stands in the folder of a Hugging Face model: tokenizer.json, else tiktoken.model, else
    /// tokenizer.model (sentencepiece); and, as far as they exist, tokenizer_config.json,
    /// special_tokens_map.json, generation_config.json, chat_template.jinja. Throws Error{Io} if
    /// there is none or it cannot be read, Error{Corrupt} for files that contradict themselves,
    /// Error{Unsupported} for tokenizers of other kinds.
    static Tokenizer from_folder(const std::filesystem::path& folder);
    /// From what model() gives, or from the content of a single tokenizer.json or sentencepiece
    /// model. name: for messages. Throws as from_folder() does.
    static Tokenizer from_model(std::string model, const std::string& name);
    /// "bytes", or else a path: a folder as for from_folder(), a file of such a folder that is
    /// named tokenizer.json or tiktoken.model, or a sentencepiece model. What a configuration file
    /// says.
    static Tokenizer from_name(const std::string& name);

    Tokenizer(Tokenizer&&) noexcept;
    Tokenizer& operator=(Tokenizer&&) noexcept;
    ~Tokenizer();

    /// Ids are below this. Some ids below it may have no token.
    std::uint32_t vocabulary() const noexcept;
    /// The id that stands between documents: eos, where the tokenizer has one.
    std::uint32_t end_of_document() const noexcept;
    /// The ids with which a model ends its answer: eos_token and the eos_token_id of
    /// generation_config.json. At least one, ascending.
    const std::vector<std::uint32_t>& end_tokens() const noexcept;
    std::optional<std::uint32_t> bos() const noexcept;
    std::optional<std::uint32_t> pad() const noexcept;
    /// Whether the id stands for a token; below vocabulary() some may not.
    bool has_token(std::uint32_t id) const;
    /// The id of a whole token, special ones included, e.g. "<|im_end|>".
    std::optional<std::uint32_t> id_of(std::string_view token) const;
    /// The chat template that came with the tokenizer; "": none. See chat_template.hpp.
    const std::string& chat_template() const noexcept;

    /// "bytes", or the path as given.
    const std::string& name() const noexcept;
    /// The content from which from_model() makes the same; "": bytes.
    const std::string& model() const noexcept;
    /// The files of a Hugging Face folder that make the same tokenizer, by name; none: bytes.
    std::map<std::string, std::string> files() const;
    /// The same for tokenizers that give the same tokens.
    std::uint64_t fingerprint() const noexcept;

    /// Never gives a special token. Bytes that are not UTF-8 count as U+FFFD, one for each longest
    /// beginning of a character. A sentencepiece model encodes a text word by word, a word with the
    /// spaces before it, or line by line if its pieces reach over spaces; of lines longer than
    /// 16 KiB, part by part. The tokens are those of the whole text, unless pieces or runs of
    /// unknown characters reach over such cuts. Throws Error{Unsupported} where a text takes a
    /// regular expression of tokenizer.json too many steps.
    std::vector<std::uint32_t> encode(std::string_view text) const;
    std::vector<std::uint32_t> encode(std::string_view text, const EncodeOptions& options) const;
    /// Special tokens give no text, ids outside the vocabulary Error{InvalidArgument}. Byte-level
    /// BPE gives UTF-8, with U+FFFD for bytes that are none. For text that grows token by token
    /// see stream_decoder.hpp.
    std::string decode(std::span<const std::uint32_t> ids) const;

private:
    friend class text::TextEncoder;
    friend class StreamDecoder;
    friend class ChatTemplate;
    struct Impl;
    explicit Tokenizer(std::unique_ptr<const Impl> impl);
    void require_known(std::uint32_t id) const;
    std::unique_ptr<const Impl> impl_;
};

} // namespace bellows
