// SPDX-License-Identifier: MIT
#include "pipeline_json.hpp"

#include "json_members.hpp"

#include <bellows/base/error.hpp>

namespace bellows::text {

namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostParts = 64;
constexpr const char* kGpt2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                              "|\\s+(?!\\S)|\\s+";

[[noreturn]] void unsupported(const std::string& message) {
    throw Error(ErrorCode::Unsupported, message);
}

/// The parts of a sequence, or the one part that stands there; none: null.
std::vector<const Json*> parts_of(const Json& json, const char* list, const char* what) {
    std::vector<const Json*> parts;
    if (json.is_null()) {
        return parts;
    }
    if (string_of(json, "type") != "Sequence") {
        parts.push_back(&json);
        return parts;
    }
    const Json& items = member(json, list);
    if (!items.is_array() || items.size() > kMostParts) {
        throw Error(ErrorCode::Corrupt, "the " + std::string(what) + " of tokenizer.json needs \"" +
                                            list + "\", a list of at most " +
                                            std::to_string(kMostParts));
    }
    for (const Json& item : items) {
        const std::vector<const Json*> inner = parts_of(item, list, what);
        parts.insert(parts.end(), inner.begin(), inner.end());
        if (parts.size() > kMostParts) {
            unsupported("the " + std::string(what) + " of tokenizer.json has more than " +
                        std::to_string(kMostParts) + " parts");
        }
    }
    return parts;
}

Regex regex_of(const Json& split) {
    const Json& pattern = member(split, "pattern");
    require_known(pattern, "the pattern of a Split of tokenizer.json", {"Regex", "String"});
    if (pattern.size() != 1) {
        unsupported("the pattern of a Split must be a Regex or a String");
    }
    return pattern.contains("Regex") ? Regex(string_of(pattern, "Regex"))
                                     : Regex::literal(string_of(pattern, "String"));
}

void add_split(const Json& split, PreTokenizer& pieces) {
    require_known(split, "a Split of tokenizer.json", {"type", "pattern", "behavior", "invert"});
    if (const std::string behavior = string_of(split, "behavior"); behavior != "Isolated") {
        unsupported("a Split with the behavior " + in_quotes(behavior) +
                    " is not supported; \"Isolated\" is");
    }
    if (flag(split, "invert", false)) {
        unsupported("a Split with \"invert\" is not supported");
    }
    pieces.add(regex_of(split));
}

/// The regular expression is part of the byte-level step unless it says otherwise.
void add_byte_level(const Json& json, PreTokenizer& pieces) {
    require_known(json, "ByteLevel of tokenizer.json",
                  {"type", "add_prefix_space", "trim_offsets", "use_regex"});
    if (flag(json, "add_prefix_space", true)) {
        unsupported("ByteLevel with \"add_prefix_space\" is not supported");
    }
    if (flag(json, "use_regex", true)) {
        pieces.add(Regex(kGpt2));
    }
}

std::vector<std::uint32_t> ids_of(const Json& token, const Json& special_tokens) {
    const std::string name = string_of(token, "id");
    const Json& ids = member(member(special_tokens, name.c_str()), "ids");
    std::vector<std::uint32_t> out;
    if (!ids.is_array() || ids.size() > kMostParts) {
        throw Error(ErrorCode::Corrupt,
                    "TemplateProcessing of tokenizer.json has no ids for " + in_quotes(name));
    }
    for (const Json& id : ids) {
        out.push_back(id_of(id, in_quotes(name)));
    }
    return out;
}

void read_template(const Json& json, BpeModel& model) {
    require_known(json, "TemplateProcessing of tokenizer.json",
                  {"type", "single", "pair", "special_tokens"});
    const Json& single = member(json, "single");
    if (!single.is_array() || single.size() > kMostParts) {
        throw Error(ErrorCode::Corrupt, "TemplateProcessing of tokenizer.json has no \"single\"");
    }
    bool text_seen = false;
    for (const Json& part : single) {
        require_known(part, "\"single\" of TemplateProcessing", {"SpecialToken", "Sequence"});
        if (part.contains("Sequence")) {
            if (text_seen) {
                unsupported("TemplateProcessing that repeats the text is not supported");
            }
            text_seen = true;
            continue;
        }
        auto& side = text_seen ? model.behind_text : model.before_text;
        for (const std::uint32_t id :
             ids_of(member(part, "SpecialToken"), member(json, "special_tokens"))) {
            if (id >= model.tokens.size()) {
                throw Error(ErrorCode::Corrupt, "TemplateProcessing of tokenizer.json has the id " +
                                                    std::to_string(id) + ", which no token has");
            }
            side.push_back(id);
        }
    }
    if (!text_seen) {
        unsupported("TemplateProcessing without the text is not supported");
    }
}

} // namespace

bool read_normalizer(const Json& json) {
    bool nfc = false;
    for (const Json* part : parts_of(json, "normalizers", "normalizer")) {
        if (const std::string type = string_of(*part, "type"); type != "NFC") {
            unsupported("the normalizer " + in_quotes(type) + " is not supported; NFC is");
        }
        nfc = true;
    }
    return nfc;
}

void read_pre_tokenizer(const Json& json, PreTokenizer& pieces) {
    bool byte_level = false;
    for (const Json* part : parts_of(json, "pretokenizers", "pre_tokenizer")) {
        const std::string type = string_of(*part, "type");
        if (byte_level) {
            unsupported("the pre_tokenizer " + in_quotes(type) +
                        " behind ByteLevel is not supported");
        }
        if (type == "Split") {
            add_split(*part, pieces);
        } else if (type == "Digits") {
            require_known(*part, "Digits of tokenizer.json", {"type", "individual_digits"});
            pieces.add(Regex(flag(*part, "individual_digits", false) ? "\\p{N}" : "\\p{N}+"));
        } else if (type == "ByteLevel") {
            add_byte_level(*part, pieces);
            byte_level = true;
        } else {
            unsupported("the pre_tokenizer " + in_quotes(type) +
                        " is not supported; Split, Digits and ByteLevel are");
        }
    }
    if (!byte_level) {
        unsupported("a tokenizer.json whose pre_tokenizer has no ByteLevel is not supported");
    }
}

void read_post_processor(const Json& json, BpeModel& model) {
    for (const Json* part : parts_of(json, "processors", "post_processor")) {
        const std::string type = string_of(*part, "type");
        if (type == "TemplateProcessing") {
            read_template(*part, model);
        } else if (type != "ByteLevel") {
            unsupported("the post_processor " + in_quotes(type) +
                        " is not supported; TemplateProcessing and ByteLevel are");
        }
    }
}

void check_decoder(const Json& json) {
    const std::vector<const Json*> parts = parts_of(json, "decoders", "decoder");
    if (parts.size() != 1 || string_of(*parts[0], "type") != "ByteLevel") {
        const std::string type = parts.empty() ? "null" : string_of(*parts[0], "type");
        unsupported("the decoder " + in_quotes(type) + " is not supported; ByteLevel alone is");
    }
}

} // namespace bellows::text
