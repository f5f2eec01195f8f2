// SPDX-License-Identifier: MIT
#pragma once

// Byte-pair encoding of one piece of a text: its bytes are joined, always the pair of the lowest
// rank, the leftmost of equal ones. n bytes take O(n log n). Immutable; any thread.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace bellows::text {

struct StringHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept {
        return std::hash<std::string_view>()(text);
    }
};
using TokenIds = std::unordered_map<std::string, std::uint32_t, StringHash, std::equal_to<>>;

class Bpe {
public:
    struct Merge {
        std::uint32_t rank;
        std::uint32_t id;
    };
    /// tokens: by their bytes. whole_pieces: a piece that is a token is not taken apart.
    Bpe(TokenIds tokens, bool whole_pieces);
    /// A pair that is added again gets the new rank.
    void add_merge(std::uint32_t left, std::uint32_t right, Merge merge);
    void reserve(std::size_t merges);

    const TokenIds& tokens() const noexcept { return tokens_; }

    struct Scratch {
        struct Symbol {
            std::uint32_t id;
            std::int32_t before, next; ///< -1: none
            bool gone;
        };
        struct Candidate {
            std::uint32_t rank;
            std::uint32_t at;
            std::uint32_t id;
        };
        std::vector<Symbol> symbols;
        std::vector<Candidate> heap;
    };
    /// Appends the ids of a piece of less than 2^31 bytes. Bytes without a token are left out.
    void encode(std::string_view piece, Scratch& scratch, std::vector<std::uint32_t>& ids) const;

private:
    struct Slot {
        std::uint64_t pair;
        Merge merge;
    };
    const Merge* find(std::uint32_t left, std::uint32_t right) const noexcept;
    void insert(const Slot& slot) noexcept;
    void offer(Scratch& scratch, std::int32_t at) const;

    TokenIds tokens_;
    bool whole_pieces_;
    std::array<std::int64_t, 256> of_byte_; ///< -1: none
    std::vector<Slot> table_;               ///< open addressing; a power of two, half full at most
    std::size_t num_merges_ = 0;
};

} // namespace bellows::text
