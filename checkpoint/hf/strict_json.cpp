// SPDX-License-Identifier: MIT
#include "strict_json.hpp"

#include <bellows/base/error.hpp>

#include <set>
#include <vector>

namespace bellows {

using Json = nlohmann::json;

Json parse_object_strictly(std::string_view text, const std::string& file) {
    constexpr int kDeepest = 16;
    std::vector<std::set<std::string>> keys; // of the objects that are open
    const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
        if (depth > kDeepest)
            throw Error(ErrorCode::Corrupt, file + " is nested too deeply");
        if (event == Json::parse_event_t::object_start)
            keys.emplace_back();
        else if (event == Json::parse_event_t::object_end)
            keys.pop_back();
        else if (event == Json::parse_event_t::key &&
                 !keys.back().insert(value.get<std::string>()).second)
            throw Error(ErrorCode::Corrupt,
                        file + " has the key " + in_quotes(value.get<std::string>()) + " twice");
        return true;
    };
    Json json;
    try {
        json = Json::parse(text, check);
    } catch (const Json::exception&) {
        throw Error(ErrorCode::Corrupt, file + " is not JSON");
    }
    if (!json.is_object())
        throw Error(ErrorCode::Corrupt, file + " is not a JSON object");
    return json;
}

} // namespace bellows
