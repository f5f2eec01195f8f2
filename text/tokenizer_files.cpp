// SPDX-License-Identifier: MIT
#include "tokenizer_files.hpp"

#include "base/strict_json.hpp"
#include "bpe/json_members.hpp"

#include <bellows/base/error.hpp>
#include <bellows/base/files.hpp>

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

namespace bellows::text {

namespace fs = std::filesystem;

namespace {

using Json = nlohmann::json;
using IdOf = std::function<std::optional<std::uint32_t>(std::string_view)>;

constexpr std::string_view kMagic = "bellows tokenizer files 1\n";
/// Any of these makes a tokenizer; the first that exists counts.
constexpr std::array kModels = {"tokenizer.json", "tiktoken.model", "tokenizer.model"};
constexpr std::array kAround = {"tokenizer_config.json", "special_tokens_map.json",
                                "generation_config.json", "chat_template.jinja"};
constexpr std::uint64_t kLargestAround = std::uint64_t{16} << 20;

bool is_known(std::string_view name) {
    return std::find(kModels.begin(), kModels.end(), name) != kModels.end() ||
           std::find(kAround.begin(), kAround.end(), name) != kAround.end();
}

bool stands(const fs::path& path) {
    std::error_code error;
    return fs::exists(fs::status(path, error));
}

[[noreturn]] void not_sound() {
    throw Error(ErrorCode::Corrupt, "the tokenizer's files were not kept whole");
}

/// A token's name: a string, or an object with "content". "": none.
std::string token_name(const Json& json, const char* key) {
    const Json& value = member(json, key);
    return value.is_object() ? string_of(value, "content") : string_of(json, key);
}

std::string template_of(const Json& value) {
    if (value.is_null()) {
        return "";
    }
    if (value.is_string()) {
        return value.get<std::string>();
    }
    if (!value.is_array()) {
        throw Error(ErrorCode::Corrupt,
                    "\"chat_template\" of tokenizer_config.json is neither a string nor a list");
    }
    for (const Json& item : value) {
        if (string_of(item, "name") == "default") {
            return string_of(item, "template");
        }
    }
    return "";
}

class Reader {
public:
    Reader(const TokenizerFiles& files, std::uint32_t vocabulary, const IdOf& id_of)
        : files_(files), vocabulary_(vocabulary), id_of_(id_of) {}

    SpecialTokens run() {
        read_names("special_tokens_map.json");
        read_names("tokenizer_config.json"); // counts more
        read_generation();
        if (const auto file = files_.find("chat_template.jinja"); file != files_.end()) {
            found_.chat_template = file->second;
        }
        if (found_.eos) {
            found_.end_tokens.push_back(*found_.eos);
        } else if (!found_.end_tokens.empty()) {
            found_.eos = found_.end_tokens.front();
        }
        auto& ends = found_.end_tokens;
        std::sort(ends.begin(), ends.end());
        ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
        return std::move(found_);
    }

private:
    void read_names(const std::string& name) {
        const auto file = files_.find(name);
        if (file == files_.end()) {
            return;
        }
        const Json json = parse_strict_object(file->second, name);
        for (const auto& [key, id] :
             {std::pair{"bos_token", &found_.bos}, std::pair{"eos_token", &found_.eos},
              std::pair{"pad_token", &found_.pad}}) {
            const std::string token = token_name(json, key);
            if (token.empty()) {
                continue;
            }
            *id = id_of_(token);
            if (!*id && id != &found_.pad) { // what pads may be added later, for training
                throw Error(ErrorCode::Corrupt, "\"" + std::string(key) + "\" of " + name + " is " +
                                                    in_quotes(token) +
                                                    ", which the tokenizer does not have");
            }
        }
        for (const auto& [key, value] : {std::pair{"add_bos_token", &found_.add_bos},
                                         std::pair{"add_eos_token", &found_.add_eos}}) {
            if (!member(json, key).is_null()) {
                *value = flag(json, key, false);
            }
        }
        found_.chat_template = template_of(member(json, "chat_template"));
    }

    std::uint32_t checked(const Json& id, const char* key) const {
        const std::string where = "\"" + std::string(key) + "\" of generation_config.json";
        const std::uint32_t value = id_of(id, where);
        if (value >= vocabulary_) {
            throw Error(ErrorCode::Corrupt, where + " is " + std::to_string(value) +
                                                "; the tokenizer's ids are below " +
                                                std::to_string(vocabulary_));
        }
        return value;
    }

    void read_generation() {
        const auto file = files_.find("generation_config.json");
        if (file == files_.end()) {
            return;
        }
        const Json json = parse_strict_object(file->second, file->first);
        const Json& ends = member(json, "eos_token_id");
        if (ends.is_array()) {
            for (const Json& id : ends) {
                found_.end_tokens.push_back(checked(id, "eos_token_id"));
            }
        } else if (!ends.is_null()) {
            found_.end_tokens.push_back(checked(ends, "eos_token_id"));
        }
        if (const Json& bos = member(json, "bos_token_id"); !found_.bos && !bos.is_null()) {
            found_.bos = checked(bos, "bos_token_id");
        }
    }

    const TokenizerFiles& files_;
    std::uint32_t vocabulary_;
    const IdOf& id_of_;
    SpecialTokens found_;
};

} // namespace

TokenizerFiles read_tokenizer_files(const fs::path& folder) {
    TokenizerFiles files;
    for (const char* name : kModels) {
        if (stands(folder / name)) {
            files[name] = read_file(folder / name, kLargestTokenizerFile);
            break;
        }
    }
    if (files.empty()) {
        throw Error(ErrorCode::Io, "no tokenizer in " + in_quotes(folder.string()) +
                                       ": there is no tokenizer.json, tiktoken.model or "
                                       "tokenizer.model");
    }
    for (const char* name : kAround) {
        if (stands(folder / name)) {
            files[name] = read_file(folder / name, kLargestAround);
        }
    }
    return files;
}

std::string pack_files(const TokenizerFiles& files) {
    std::string packed(kMagic);
    for (const auto& [name, content] : files) {
        packed += name + " " + std::to_string(content.size()) + "\n";
    }
    packed += "\n";
    for (const auto& [name, content] : files) {
        packed += content;
    }
    return packed;
}

bool is_packed(std::string_view content) {
    return content.starts_with(kMagic);
}

TokenizerFiles unpack_files(std::string_view content) {
    std::vector<std::pair<std::string, std::size_t>> list;
    content.remove_prefix(kMagic.size());
    for (;;) {
        const std::size_t end = content.find('\n');
        if (end == std::string_view::npos) {
            not_sound();
        }
        const std::string_view line = content.substr(0, end);
        content.remove_prefix(end + 1);
        if (line.empty()) {
            break;
        }
        const std::size_t space = std::min(line.find(' '), line.size());
        const std::string_view digits = line.substr(std::min(space + 1, line.size()));
        std::size_t bytes = 0;
        const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), bytes);
        if (parsed.ec != std::errc() || parsed.ptr != digits.data() + digits.size() ||
            !is_known(line.substr(0, space))) {
            not_sound();
        }
        list.emplace_back(line.substr(0, space), bytes);
    }
    TokenizerFiles files;
    for (const auto& [name, bytes] : list) {
        if (bytes > content.size() || !files.emplace(name, content.substr(0, bytes)).second) {
            not_sound();
        }
        content.remove_prefix(bytes);
    }
    if (!content.empty()) {
        not_sound();
    }
    return files;
}

SpecialTokens read_special_tokens(const TokenizerFiles& files, std::uint32_t vocabulary,
                                  const IdOf& id_of) {
    return Reader(files, vocabulary, id_of).run();
}

} // namespace bellows::text
