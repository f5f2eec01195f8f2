// SPDX-License-Identifier: MIT
#pragma once

// A Jinja template in tokens, with trim_blocks and lstrip_blocks on, as Hugging Face has it. Pure.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::text::jinja {

struct Token {
    enum class Kind : std::uint8_t {
        Data,
        PrintBegin,
        PrintEnd,
        BlockBegin,
        BlockEnd,
        Name,
        String,
        Integer,
        Float,
        Operator,
        End
    };
    Kind kind;
    std::string text;
    int line = 0;
};

/// Throws Error{Unsupported} for what is none or too long.
std::vector<Token> tokens_of(std::string_view source);

[[noreturn]] void refuse(int line, const std::string& why);

} // namespace bellows::text::jinja
