// SPDX-License-Identifier: MIT
#pragma once

// Runs a chat template. Immutable; any thread.

#include "jinja_ast.hpp"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace bellows::text::jinja {

class Template {
public:
    /// Throws Error{Unsupported} with the line of what is not known.
    explicit Template(std::string_view source) : body_(parse(source)) {}

    /// globals: what the template finds by name. Throws Error{InvalidArgument} for what the
    /// template itself refuses, Error{Unsupported} for what is not known, or takes too much.
    MarkedText render(const std::vector<std::pair<std::string, Value>>& globals) const;

private:
    Body body_;
};

} // namespace bellows::text::jinja
