// SPDX-License-Identifier: MIT
#include "config_keys.hpp"

#include <bellows/base/error.hpp>

#include <cmath>
#include <utility>

namespace bellows {

using Json = nlohmann::json;

namespace {

std::optional<std::uint64_t> as_count(const Json& value) {
    constexpr double kMost = 9007199254740992.0; // 2^53
    if (value.is_number_unsigned())
        return value.get<std::uint64_t>();
    if (!value.is_number_float())
        return std::nullopt;
    const double real = value.get<double>();
    const bool whole = real >= 0 && real <= kMost && std::floor(real) == real;
    return whole ? std::optional(static_cast<std::uint64_t>(real)) : std::nullopt;
}

} // namespace

ConfigKeys::ConfigKeys(const Json& object, std::string source, std::string path)
    : object_(&object), source_(std::move(source)), path_(std::move(path)) {
}

const Json* ConfigKeys::take(const std::string& key) {
    const auto found = object_->find(key);
    if (found == object_->end())
        return nullptr;
    taken_.insert(key);
    return found->is_null() ? nullptr : &*found;
}

void ConfigKeys::refuse(const std::string& key, const std::string& problem) const {
    const auto found = object_->find(key);
    std::string value;
    if (found != object_->end()) {
        const std::string text = found->dump(-1, ' ', true, Json::error_handler_t::replace);
        constexpr std::size_t kLongest = 60;
        value = " = " + (text.size() > kLongest ? text.substr(0, kLongest) + "..." : text);
    }
    throw Error(ErrorCode::InvalidArgument, source_ + ": " + path_ + key + value + " " + problem);
}

bool ConfigKeys::has(const std::string& key) {
    return take(key) != nullptr;
}

std::optional<std::uint64_t> ConfigKeys::count(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return std::nullopt;
    const std::optional<std::uint64_t> count = as_count(*value);
    if (!count)
        refuse(key, "is not a whole number of at least 0");
    return count;
}

std::optional<double> ConfigKeys::real(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return std::nullopt;
    if (!value->is_number())
        refuse(key, "is not a number");
    return value->get<double>();
}

std::optional<bool> ConfigKeys::flag(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return std::nullopt;
    if (!value->is_boolean())
        refuse(key, "is not true or false");
    return value->get<bool>();
}

std::optional<std::string> ConfigKeys::text(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return std::nullopt;
    if (!value->is_string())
        refuse(key, "is not a text");
    return value->get<std::string>();
}

std::vector<std::uint64_t> ConfigKeys::counts(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return {};
    std::vector<std::uint64_t> all;
    for (const Json& item : value->is_array() ? *value : Json::array({*value})) {
        const std::optional<std::uint64_t> count = as_count(item);
        if (!count)
            refuse(key, "is neither a whole number of at least 0 nor a list of such");
        all.push_back(*count);
    }
    return all;
}

std::vector<std::string> ConfigKeys::texts(const std::string& key) {
    const Json* const value = take(key);
    if (value == nullptr)
        return {};
    std::vector<std::string> all;
    if (!value->is_array())
        refuse(key, "is not a list of texts");
    for (const Json& item : *value) {
        if (!item.is_string())
            refuse(key, "is not a list of texts");
        all.push_back(item.get<std::string>());
    }
    return all;
}

const Json* ConfigKeys::object(const std::string& key) {
    const Json* const value = take(key);
    if (value != nullptr && !value->is_object())
        refuse(key, "is not an object");
    return value;
}

void ConfigKeys::require(const std::string& key, const Json& value, const std::string& why) {
    const Json* const found = take(key);
    if (found != nullptr && *found != value)
        refuse(key, "is not supported: " + why);
}

std::vector<std::string> ConfigKeys::rest() const {
    std::vector<std::string> names;
    for (const auto& [key, value] : object_->items())
        if (!taken_.contains(key))
            names.push_back(key);
    return names;
}

} // namespace bellows
