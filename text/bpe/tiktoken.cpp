// SPDX-License-Identifier: MIT
#include "tokenizer_json.hpp"

#include "base/strict_json.hpp"
#include "json_members.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>
#include <charconv>

namespace bellows::text {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kLongestToken = 1024;

/// The expression of Kimi's and Moonlight's tokenization code. What is there an intersection, as
/// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]], is here all but the other categories.
#define BELLOWS_UPPER "[^\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{Han}]"
#define BELLOWS_LOWER "[^\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}\\p{Han}]"
#define BELLOWS_SHORT "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
constexpr const char* kKimi =
    "[\\p{Han}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?" BELLOWS_UPPER "*" BELLOWS_LOWER "+" BELLOWS_SHORT
    "|[^\\r\\n\\p{L}\\p{N}]?" BELLOWS_UPPER "+" BELLOWS_LOWER "*" BELLOWS_SHORT "|\\p{N}{1,3}"
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
    "|\\s*[\\r\\n]+"
    "|\\s+(?!\\S)"
    "|\\s+";
#undef BELLOWS_UPPER
#undef BELLOWS_LOWER
#undef BELLOWS_SHORT
/// How many ids such a tokenizer keeps for special tokens.
constexpr std::uint32_t kReserved = 256;

[[noreturn]] void bad_line(std::size_t line, const char* why) {
    throw Error(ErrorCode::Corrupt, "line " + std::to_string(line) + " of tiktoken.model " + why);
}

int base64_digit(char c) noexcept {
    return c >= 'A' && c <= 'Z'   ? c - 'A'
           : c >= 'a' && c <= 'z' ? c - 'a' + 26
           : c >= '0' && c <= '9' ? c - '0' + 52
           : c == '+'             ? 62
           : c == '/'             ? 63
                                  : -1;
}

std::string from_base64(std::string_view text, std::size_t line) {
    if (text.empty() || text.size() % 4 != 0) {
        bad_line(line, "does not begin with base64");
    }
    std::string out;
    for (std::size_t at = 0; at < text.size(); at += 4) {
        const std::string_view four = text.substr(at, 4);
        const bool last = at + 4 == text.size();
        const std::size_t digits = last ? std::min(four.find('='), four.size()) : 4;
        std::uint32_t bits = 0;
        for (std::size_t i = 0; i < 4; ++i) {
            const int digit = i < digits ? base64_digit(four[i]) : 0;
            if (digit < 0 || (i >= digits && four[i] != '=') || digits < 2) {
                bad_line(line, "does not begin with base64");
            }
            bits = bits << 6 | static_cast<std::uint32_t>(digit);
        }
        for (std::size_t i = 0; i + 1 < digits; ++i) {
            out.push_back(static_cast<char>(bits >> (16 - 8 * i)));
        }
    }
    return out;
}

TokenIds read_ranks(std::string_view content, TokenTable& table) {
    TokenIds tokens;
    std::size_t line = 0;
    while (!content.empty()) {
        const std::size_t end = std::min(content.find('\n'), content.size());
        std::string_view text = content.substr(0, end);
        content.remove_prefix(std::min(end + 1, content.size()));
        ++line;
        if (text.ends_with('\r')) {
            text.remove_suffix(1);
        }
        if (text.empty()) {
            continue;
        }
        const std::size_t space = text.find(' ');
        if (space == std::string_view::npos) {
            bad_line(line, "has no rank");
        }
        const std::string bytes = from_base64(text.substr(0, space), line);
        if (bytes.size() > kLongestToken) {
            bad_line(line, "has a token of more than 1024 bytes");
        }
        std::uint32_t rank = 0;
        const char* last = text.data() + text.size();
        const auto parsed = std::from_chars(text.data() + space + 1, last, rank);
        if (parsed.ec != std::errc() || parsed.ptr != last) {
            bad_line(line, "has a rank that is no whole number");
        }
        if (!tokens.emplace(bytes, rank).second) {
            bad_line(line, "has the token of another line");
        }
        const std::uint32_t before = table.size();
        if (rank < before && !table.bytes(rank).empty()) {
            bad_line(line, "has the rank of another line");
        }
        table.set(rank, bytes);
    }
    return tokens;
}

/// Two tokens are joined by the rank of what they are together.
void add_merges(Bpe& bpe) {
    for (const auto& [token, rank] : bpe.tokens()) {
        const std::string_view bytes(token);
        for (std::size_t cut = 1; cut < bytes.size(); ++cut) {
            const auto left = bpe.tokens().find(bytes.substr(0, cut));
            if (left == bpe.tokens().end()) {
                continue;
            }
            const auto right = bpe.tokens().find(bytes.substr(cut));
            if (right != bpe.tokens().end()) {
                bpe.add_merge(left->second, right->second, {rank, rank});
            }
        }
    }
}

void read_special_tokens(const std::string& config, BpeModel& model) {
    const Json json = parse_strict_object(config, "tokenizer_config.json");
    const Json& list = member(json, "added_tokens_decoder");
    if (!list.is_null() && !list.is_object()) {
        throw Error(ErrorCode::Corrupt,
                    "\"added_tokens_decoder\" of tokenizer_config.json is no object");
    }
    for (const auto& [key, value] : list.items()) {
        AddedToken token;
        const auto parsed = std::from_chars(key.data(), key.data() + key.size(), token.id);
        if (parsed.ec != std::errc() || parsed.ptr != key.data() + key.size()) {
            throw Error(ErrorCode::Corrupt, "\"added_tokens_decoder\" of tokenizer_config.json has "
                                            "the key " +
                                                in_quotes(key) + ", which is no id");
        }
        token.content = string_of(value, "content");
        token.special = true; // as that code has it, whatever the file says
        const std::string bytes = token.content;
        model.add(std::move(token), bytes);
    }
}

} // namespace

std::unique_ptr<BpeModel> read_tiktoken(const std::string& content, const std::string& config) {
    TokenTable table;
    TokenIds tokens = read_ranks(content, table);
    if (tokens.empty()) {
        throw Error(ErrorCode::Corrupt, "tiktoken.model has no tokens");
    }
    auto model = std::make_unique<BpeModel>(Bpe(std::move(tokens), true));
    const std::uint32_t ranks = table.size();
    model->tokens = std::move(table);
    add_merges(model->bpe);
    model->pieces.add(Regex(kKimi));
    if (!config.empty()) {
        read_special_tokens(config, *model);
    }
    // That code gives the rest of the reserved ids such names, too.
    for (std::uint32_t id = ranks; id < ranks + kReserved; ++id) {
        const std::string name = "<|reserved_token_" + std::to_string(id) + "|>";
        if ((id >= model->tokens.size() || model->tokens.bytes(id).empty()) &&
            !model->added.contains(name)) {
            AddedToken token;
            token.id = id;
            token.content = name;
            token.special = true;
            model->add(std::move(token), name);
        }
    }
    return model;
}

} // namespace bellows::text
