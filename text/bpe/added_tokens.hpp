// SPDX-License-Identifier: MIT
#pragma once

// Tokens that are found in the text itself, before it is cut into pieces: the longest of those that
// begin leftmost. Immutable; any thread.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::text {

struct AddedToken {
    std::uint32_t id = 0;
    std::string content;
    bool single_word = false; ///< only where no word character stands beside it
    bool lstrip = false;      ///< takes the white space before it
    bool rstrip = false;      ///< and behind it
    bool normalized = false;  ///< found in normalised text
    bool special = false;
    /// Special, or looks like a marker ("<...>"): no text of a conversation's message gives it.
    bool marker = false;
};

/// Which of them count.
enum class Recognise : std::uint8_t { All, NotSpecial, NotMarkers };

class AddedTokenFinder {
public:
    AddedTokenFinder();
    /// Empty ones are never found.
    void add(const AddedToken& token);
    bool empty() const noexcept { return tokens_.empty(); }

    /// own: for each byte of the text, whether all tokens count there; empty: `recognise` counts
    /// everywhere. A token that `recognise` leaves out is found where all of its bytes are `own`.
    /// take(first, end, token) gets the tokens and what stands between them (token: null), in
    /// order.
    using Take = std::function<void(std::size_t, std::size_t, const AddedToken*)>;
    void split(std::string_view text, Recognise recognise, std::string_view own,
               const Take& take) const;

private:
    struct Node {
        std::vector<std::pair<unsigned char, std::uint32_t>> next;
        std::int64_t token = -1;
    };
    const AddedToken* longest_at(std::string_view text, std::size_t at) const noexcept;

    std::vector<AddedToken> tokens_;
    std::vector<Node> nodes_;
    std::vector<bool> begins_; ///< by byte
};

} // namespace bellows::text
