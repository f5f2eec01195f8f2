// SPDX-License-Identifier: MIT
#pragma once

// JSON files of others, which may hold anything. Pure; a header alone, so that base needs no JSON.

#include <bellows/base/error.hpp>
#include <bellows/base/printable.hpp>

#include <nlohmann/json.hpp>

#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace bellows {

/// A JSON object. Throws Error{Corrupt} that begins with `name` where the text is no JSON, no
/// object, nested more than 24 deep, or has a key twice in one object.
inline nlohmann::json parse_strict_object(std::string_view text, const std::string& name) {
    using Json = nlohmann::json;
    constexpr int kDeepest = 24;
    const auto corrupt = [&](const std::string& problem) {
        throw Error(ErrorCode::Corrupt, name + problem);
    };
    std::vector<std::unordered_set<std::string>> keys; // of the objects that are open
    const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
        if (depth > kDeepest)
            corrupt(" is nested more than " + std::to_string(kDeepest) + " deep");
        if (event == Json::parse_event_t::object_start) {
            keys.emplace_back();
        } else if (event == Json::parse_event_t::object_end) {
            keys.pop_back();
        } else if (event == Json::parse_event_t::key) {
            const auto& key = parsed.get_ref<const std::string&>();
            if (!keys.back().insert(key).second)
                corrupt(" has the key " + in_quotes(key) + " twice in one object");
        }
        return true;
    };
    Json json;
    try {
        json = Json::parse(text, check);
    } catch (const Json::exception& error) {
        corrupt(" is no sound JSON: " + bounded(error.what()));
    }
    if (!json.is_object())
        corrupt(" is no JSON object");
    return json;
}

} // namespace bellows
