// SPDX-License-Identifier: MIT
#pragma once

// Oniguruma's syntax in PCRE2's. Pure.

#include <string>
#include <string_view>

namespace bellows::text {

/// Throws Error{Unsupported} for what the two read differently, and for what a tokenizer does not
/// need (back references, recursion, code).
std::string pcre2_syntax(std::string_view pattern);

} // namespace bellows::text
