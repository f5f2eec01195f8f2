// SPDX-License-Identifier: MIT
#include "json_members.hpp"

#include <bellows/base/error.hpp>

#include <algorithm>

namespace bellows::text {

namespace {

using Json = nlohmann::json;

[[noreturn]] void corrupt(const std::string& message) {
    throw Error(ErrorCode::Corrupt, message);
}

} // namespace

void require_known(const Json& json, std::string_view where,
                   std::initializer_list<std::string_view> keys) {
    if (!json.is_object()) {
        corrupt(std::string(where) + " is no object");
    }
    for (const auto& [key, value] : json.items()) {
        if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
            throw Error(ErrorCode::Unsupported,
                        std::string(where) + " has the unknown key " + in_quotes(key));
        }
    }
}

const Json& member(const Json& json, const char* key) {
    static const Json kNull;
    if (!json.is_object()) {
        corrupt("where the key \"" + std::string(key) + "\" is looked for, there is no object");
    }
    const auto found = json.find(key);
    return found == json.end() ? kNull : *found;
}

bool flag(const Json& json, const char* key, bool otherwise) {
    const Json& value = member(json, key);
    if (value.is_null()) {
        return otherwise;
    }
    if (!value.is_boolean()) {
        corrupt("\"" + std::string(key) + "\" must be true or false");
    }
    return value.get<bool>();
}

std::string string_of(const Json& json, const char* key) {
    const Json& value = member(json, key);
    if (value.is_null()) {
        return "";
    }
    if (!value.is_string()) {
        corrupt("\"" + std::string(key) + "\" must be a string");
    }
    return value.get<std::string>();
}

std::uint32_t id_of(const Json& json, std::string_view what) {
    if (!json.is_number_unsigned() || json.get<std::uint64_t>() > 0xffffffffu) {
        corrupt(std::string(what) + " has an id that is no whole number below 2^32");
    }
    return json.get<std::uint32_t>();
}

} // namespace bellows::text
