// SPDX-License-Identifier: MIT
#pragma once

// Chat templates of published models, for tokenizers that come without one.

#include <bellows/text/tokenizer.hpp>

#include <optional>
#include <string>

namespace bellows::text {

struct BuiltInTemplate {
    std::string name;
    std::string source;
};

/// By the markers that the tokenizer has; nothing: none fits.
std::optional<BuiltInTemplate> built_in_template(const Tokenizer& tokenizer);

} // namespace bellows::text
