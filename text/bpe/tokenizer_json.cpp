// SPDX-License-Identifier: MIT
#include "tokenizer_json.hpp"

#include "base/strict_json.hpp"
#include "byte_alphabet.hpp"
#include "json_members.hpp"
#include "pipeline_json.hpp"

#include <bellows/base/error.hpp>

#include <array>
#include <utility>

namespace bellows::text {

namespace {

using Json = nlohmann::json;

[[noreturn]] void corrupt(const std::string& message) {
    throw Error(ErrorCode::Corrupt, message);
}
[[noreturn]] void unsupported(const std::string& message) {
    throw Error(ErrorCode::Unsupported, message);
}

void check_model(const Json& model) {
    require_known(model, "\"model\" of tokenizer.json",
                  {"type", "dropout", "unk_token", "continuing_subword_prefix",
                   "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges", "vocab",
                   "merges"});
    const std::string type = string_of(model, "type");
    if (type != "BPE" && !type.empty()) {
        unsupported("the tokenizer model " + in_quotes(type) + " is not supported; BPE is");
    }
    if (const Json& dropout = member(model, "dropout");
        !dropout.is_null() && !(dropout.is_number() && dropout.get<double>() == 0)) {
        unsupported("\"dropout\" of a tokenizer is not supported");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
        if (!string_of(model, key).empty()) {
            unsupported("\"" + std::string(key) + "\" of a tokenizer is not supported");
        }
    }
    if (!member(model, "vocab").is_object()) {
        corrupt("\"model\" of tokenizer.json has no \"vocab\"");
    }
    if (!member(model, "merges").is_array()) {
        corrupt("\"model\" of tokenizer.json has no \"merges\"");
    }
}

/// The two tokens of a merge, in either spelling.
std::pair<std::string, std::string> parts_of(const Json& merge) {
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        return {merge[0].get<std::string>(), merge[1].get<std::string>()};
    }
    if (merge.is_string()) {
        const auto& text = merge.get_ref<const std::string&>();
        const std::size_t space = text.find(' ');
        if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
            return {text.substr(0, space), text.substr(space + 1)};
        }
    }
    corrupt("a merge of tokenizer.json is no pair of tokens: " + in_quotes(merge.dump()));
}

std::uint32_t token_of(const Json& vocab, const std::string& token) {
    const auto found = vocab.find(token);
    if (found == vocab.end()) {
        corrupt("a merge of tokenizer.json needs the token " + in_quotes(token) +
                ", which is not in \"vocab\"");
    }
    return found->get<std::uint32_t>(); // checked with the vocabulary
}

std::unique_ptr<BpeModel> read_model(const Json& json) {
    check_model(json);
    const Json& vocab = member(json, "vocab");
    TokenTable table;
    TokenIds tokens;
    tokens.reserve(vocab.size());
    for (const auto& [token, id] : vocab.items()) {
        const std::optional<std::string> bytes = bytes_of_token(token);
        const std::uint32_t number = id_of(id, "the token " + in_quotes(token));
        table.set(number, bytes ? *bytes : token);
        if (bytes && !bytes->empty()) {
            tokens.emplace(*bytes, number);
        }
    }
    std::size_t single = 0;
    for (int byte = 0; byte < 256; ++byte) {
        const char text = static_cast<char>(byte);
        single += tokens.contains(std::string_view(&text, 1));
    }
    if (single < 256 &&
        (!string_of(json, "unk_token").empty() || flag(json, "byte_fallback", false))) {
        unsupported("\"unk_token\" and \"byte_fallback\" are supported only where every byte has a "
                    "token; " +
                    std::to_string(256 - single) + " have none");
    }
    auto model =
        std::make_unique<BpeModel>(Bpe(std::move(tokens), flag(json, "ignore_merges", false)));
    model->tokens = std::move(table);
    const Json& merges = member(json, "merges");
    model->bpe.reserve(merges.size());
    std::uint32_t rank = 0;
    for (const Json& merge : merges) {
        const auto [left, right] = parts_of(merge);
        const std::uint32_t id = token_of(vocab, left + right);
        model->bpe.add_merge(token_of(vocab, left), token_of(vocab, right), {rank++, id});
    }
    return model;
}

void read_added_tokens(const Json& list, const Json& vocab, BpeModel& model) {
    if (list.is_null()) {
        return;
    }
    if (!list.is_array()) {
        corrupt("\"added_tokens\" of tokenizer.json is no list");
    }
    for (const Json& json : list) {
        require_known(
            json, "an added token of tokenizer.json",
            {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
        AddedToken token;
        token.content = string_of(json, "content");
        token.id = id_of(member(json, "id"), "the added token " + in_quotes(token.content));
        token.single_word = flag(json, "single_word", false);
        token.lstrip = flag(json, "lstrip", false);
        token.rstrip = flag(json, "rstrip", false);
        token.special = flag(json, "special", false);
        token.normalized = flag(json, "normalized", !token.special);
        const std::string bytes = bytes_of_token(token.content).value_or(token.content);
        if (const auto found = vocab.find(token.content);
            found != vocab.end() && found->get<std::uint32_t>() != token.id) {
            corrupt("the added token " + in_quotes(token.content) + " has the id " +
                    std::to_string(token.id) + ", but " + found->dump() + " in \"vocab\"");
        }
        model.add(std::move(token), bytes);
    }
}

} // namespace

std::unique_ptr<BpeModel> read_tokenizer_json(const std::string& content) {
    const Json json = parse_strict_object(content, "tokenizer.json");
    require_known(json, "tokenizer.json",
                  {"version", "truncation", "padding", "added_tokens", "normalizer",
                   "pre_tokenizer", "post_processor", "decoder", "model"});
    std::unique_ptr<BpeModel> model = read_model(member(json, "model"));
    model->nfc = read_normalizer(member(json, "normalizer"));
    read_added_tokens(member(json, "added_tokens"), member(member(json, "model"), "vocab"), *model);
    read_pre_tokenizer(member(json, "pre_tokenizer"), model->pieces);
    read_post_processor(member(json, "post_processor"), *model);
    check_decoder(member(json, "decoder"));
    return model;
}

} // namespace bellows::text
