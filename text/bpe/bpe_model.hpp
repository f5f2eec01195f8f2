// SPDX-License-Identifier: MIT
#pragma once

// What a byte-level BPE tokenizer consists of, and how a text becomes its tokens. The model is
// immutable; each thread has an encoder of its own.

#include "added_tokens.hpp"
#include "bpe.hpp"
#include "pre_tokenizer.hpp"
#include "text/piece_cache.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows::text {

inline constexpr std::uint32_t kMostIds = std::uint32_t{1} << 24;

/// What each id stands for.
class TokenTable {
public:
    /// Grows to the id. Throws Error{Corrupt} if the id has another text already, or is kMostIds or
    /// more.
    void set(std::uint32_t id, std::string_view bytes);
    void mark_special(std::uint32_t id) { entries_[id].special = true; }

    std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(entries_.size()); }
    /// "" for an id without a token.
    std::string_view bytes(std::uint32_t id) const noexcept;
    bool special(std::uint32_t id) const noexcept { return entries_[id].special; }

private:
    struct Entry {
        std::uint32_t first = 0;
        std::uint32_t bytes : 30 = 0;
        std::uint32_t known : 1 = 0;
        std::uint32_t special : 1 = 0;
    };
    std::string text_;
    std::vector<Entry> entries_;
};

struct BpeModel {
    explicit BpeModel(Bpe made) : bpe(std::move(made)) {}
    /// bytes: what it decodes to. Throws Error{Corrupt} for an id or a content that another token
    /// has.
    void add(AddedToken token, std::string_view bytes);
    std::optional<std::uint32_t> id_of(std::string_view token) const;

    Bpe bpe;
    PreTokenizer pieces;
    bool nfc = false;
    TokenTable tokens;
    TokenIds added; ///< by their content
    AddedTokenFinder added_in_text;
    AddedTokenFinder added_in_normalised_text;
    std::vector<std::uint32_t> before_text, behind_text; ///< put around a text on request
};

class BpeEncoder {
public:
    /// The model must outlive it.
    explicit BpeEncoder(const BpeModel& model) : model_(&model) {}

    struct Options {
        Recognise recognise = Recognise::NotSpecial;
        std::string_view own{}; ///< see AddedTokenFinder::split(); only for a text that is UTF-8
        std::string_view follows{}; ///< the text goes on like this, without tokens of its own
    };
    /// Appends the tokens of a text of less than 2^31 bytes; longer ones give
    /// Error{InvalidArgument}.
    void encode(std::string_view text, const Options& options, std::vector<std::uint32_t>& ids);

private:
    void encode_text(std::string_view text, const Options& options, std::size_t counted,
                     std::vector<std::uint32_t>& ids);
    void encode_segment(std::string_view text, std::size_t counted,
                        std::vector<std::uint32_t>& ids);

    const BpeModel* model_;
    Matcher matcher_;
    Bpe::Scratch scratch_;
    PieceCache cache_;
};

} // namespace bellows::text
