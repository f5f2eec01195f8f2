// SPDX-License-Identifier: MIT
#pragma once

// A chat template that has been parsed. Immutable.

#include "jinja_value.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows::text::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

struct Expression {
    enum class Kind : std::uint8_t {
        Literal,     ///< value
        Name,        ///< name
        Sequence,    ///< children
        Mapping,     ///< children: key, value, key, ...
        Attribute,   ///< children[0].name
        Index,       ///< children[0][children[1]]
        Slice,       ///< children[0][1:2:3]; null where none stands
        Call,        ///< children[0](others), named
        Filter,      ///< children[0] | name(others), named
        Test,        ///< children[0] is name(others)
        Unary,       ///< name children[0]
        Binary,      ///< children[0] name children[1]
        Conditional, ///< children[1] if children[0] else children[2], which may be null
    };
    Kind kind;
    int line;
    std::string name;
    Value value;
    std::vector<ExpressionPtr> children;
    std::vector<std::pair<std::string, ExpressionPtr>> named;
};

struct Statement;
using Body = std::vector<Statement>;

struct Statement {
    enum class Kind : std::uint8_t {
        Data,   ///< data
        Print,  ///< value
        If,     ///< value, body, otherwise
        For,    ///< names in value if condition: body, otherwise if there was none
        Set,    ///< names[0] (names[1]: its attribute) = value, or body if there is none
        Define, ///< macro
        Break,
        Continue,
    };
    Kind kind;
    int line;
    MarkedText data;
    ExpressionPtr value, condition;
    std::vector<std::string> names;
    Body body, otherwise;
    std::shared_ptr<Macro> macro;
};

struct Macro {
    std::string name;
    std::vector<std::pair<std::string, ExpressionPtr>> parameters; ///< with their defaults, or null
    Body body;
};

/// Throws Error{Unsupported} with the line of what is not known.
Body parse(std::string_view source);

} // namespace bellows::text::jinja
