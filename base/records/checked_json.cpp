// SPDX-License-Identifier: MIT
#include "checked_json.hpp"

#include "checksum.hpp"

#include <bellows/base/error.hpp>

#include <cstdint>

namespace bellows {

namespace {

using Json = nlohmann::json;

std::string dump(const Json& json, int indent) {
    return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

/// Over the text with the sum's own value as zeros.
std::uint32_t checksum_of(Json json) {
    json["checksum"] = hex32(0);
    const std::string text = dump(json, -1);
    return crc32_of(text.data(), text.size());
}

bool limit_depth(int depth, Json::parse_event_t, Json&) {
    constexpr int kDeepest = 8;
    if (depth > kDeepest) {
        throw Error(ErrorCode::Corrupt, "it is nested too deeply");
    }
    return true;
}

} // namespace

std::string format_checked(Json json) {
    json["checksum"] = hex32(checksum_of(json));
    return dump(json, 2) + "\n";
}

Json parse_shallow(const std::string& text) {
    return Json::parse(text, limit_depth);
}

void require_checksum(const Json& json) {
    if (json.at("checksum").get<std::string>() != hex32(checksum_of(json))) {
        throw Error(ErrorCode::Corrupt, "it does not fit its check sum");
    }
}

} // namespace bellows
