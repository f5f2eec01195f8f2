// SPDX-License-Identifier: MIT
#pragma once

// The files of a Hugging Face folder that make a tokenizer: read, kept in one text, and what they
// say about special tokens.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace bellows::text {

using TokenizerFiles = std::map<std::string, std::string>; ///< contents by name

/// Throws Error{Io} if there is no tokenizer, or what stands there cannot be read or is too large.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& folder);

/// The largest file of a tokenizer that is read.
inline constexpr std::uint64_t kLargestTokenizerFile = std::uint64_t{64} << 20;

std::string pack_files(const TokenizerFiles& files);
bool is_packed(std::string_view content);
/// Throws Error{Corrupt}.
TokenizerFiles unpack_files(std::string_view content);

struct SpecialTokens {
    std::optional<std::uint32_t> bos, eos, pad;
    std::vector<std::uint32_t> end_tokens; ///< eos among them; ascending
    std::optional<bool> add_bos, add_eos;
    std::string chat_template;
};
/// id_of: the id of a token. Ids that are not below `vocabulary` and names of tokens that do not
/// exist give Error{Corrupt}.
SpecialTokens
read_special_tokens(const TokenizerFiles& files, std::uint32_t vocabulary,
                    const std::function<std::optional<std::uint32_t>(std::string_view)>& id_of);

} // namespace bellows::text
