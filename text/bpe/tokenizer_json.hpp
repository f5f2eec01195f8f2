// SPDX-License-Identifier: MIT
#pragma once

// Reads files of byte-level BPE tokenizers. Pure functions.

#include "bpe_model.hpp"

#include <memory>
#include <string>

namespace bellows::text {

/// A Hugging Face tokenizer.json. Throws Error{Corrupt}, or Error{Unsupported} with the name of
/// what is not known.
std::unique_ptr<BpeModel> read_tokenizer_json(const std::string& content);

/// A tiktoken.model (lines of a token in base64 and its rank) and the tokenizer_config.json that
/// names its special tokens. Throws as read_tokenizer_json().
std::unique_ptr<BpeModel> read_tiktoken(const std::string& content, const std::string& config);

} // namespace bellows::text
