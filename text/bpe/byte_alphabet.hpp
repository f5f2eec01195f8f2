// SPDX-License-Identifier: MIT
#pragma once

// GPT-2's spelling of bytes as characters, in which byte-level BPE writes its tokens: printable
// characters of Latin-1 stand for themselves, the other bytes for U+0100 and following. Pure.

#include <optional>
#include <string>
#include <string_view>

namespace bellows::text {

/// The bytes that a token stands for; nothing if a character of it is none of the alphabet. token:
/// UTF-8.
std::optional<std::string> bytes_of_token(std::string_view token);

} // namespace bellows::text
