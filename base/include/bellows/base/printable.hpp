// SPDX-License-Identifier: MIT
#pragma once

// Untrusted text for a terminal or a message.

#include <cstddef>
#include <string>
#include <string_view>

namespace bellows {

/// The text with every control character (C0 apart from those in `keep`, DEL, C1) and every byte
/// that is not UTF-8 as \xNN: what is left cannot steer a terminal.
std::string printable(std::string_view text, std::string_view keep = "");

/// A library's message about untrusted text, for a message of ours: printable, its first `longest`
/// bytes.
std::string bounded(std::string_view text, std::size_t longest = 200);

} // namespace bellows
