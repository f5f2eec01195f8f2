// SPDX-License-Identifier: MIT
#pragma once

// Members of JSON objects from elsewhere. Pure functions.

#include <nlohmann/json.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace bellows::text {

/// Throws Error{Unsupported} if the object has another key than these, Error{Corrupt} if it is no
/// object.
void require_known(const nlohmann::json& json, std::string_view where,
                   std::initializer_list<std::string_view> keys);

/// The member, or null. Throws Error{Corrupt} if `json` is no object.
const nlohmann::json& member(const nlohmann::json& json, const char* key);

/// The values of members; what is absent or null gives the default. Throw Error{Corrupt} for other
/// types.
bool flag(const nlohmann::json& json, const char* key, bool otherwise);
std::string string_of(const nlohmann::json& json, const char* key);
/// Below 2^32.
std::uint32_t id_of(const nlohmann::json& json, std::string_view what);

} // namespace bellows::text
