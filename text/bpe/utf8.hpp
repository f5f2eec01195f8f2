// SPDX-License-Identifier: MIT
#pragma once

// UTF-8 and the few properties of characters that tokenizers ask for. Pure, any thread.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace bellows::text {

inline constexpr std::string_view kReplacement = "\xef\xbf\xbd"; // U+FFFD

/// How the bytes at the beginning of a text, which must not be empty, read.
struct Utf8Step {
    enum class Kind : std::uint8_t { Character, Broken, Unfinished };
    Kind kind;
    std::uint8_t bytes; ///< Broken and Unfinished: of the longest beginning of a character
    char32_t character = 0;
};
Utf8Step utf8_step(std::string_view text) noexcept;

bool is_utf8(std::string_view text) noexcept;

/// With U+FFFD for each longest beginning of a character that does not go on.
std::string repaired(std::string_view text);

/// As repaired(), but leaves an unfinished character at the end in `held`, to which the text was
/// appended.
std::string take_complete(std::string& held);

void append_utf8(std::string& text, char32_t character);

/// Unicode's White_Space.
bool is_white_space(char32_t character) noexcept;
/// A letter, mark, decimal digit or connector: \w.
bool is_word_character(char32_t character) noexcept;

/// The last character of a text that is UTF-8 and not empty.
char32_t last_character(std::string_view text, std::size_t& bytes) noexcept;

/// Unicode's NFC of a text that is UTF-8. False: it is that already, and `out` is unchanged.
bool normalise_nfc(std::string_view text, std::string& out);

} // namespace bellows::text
